import pytest
import torch

from rmdm.backbone import triton_here


def test_where_triton_cannot_compile_all_goes_on_without(monkeypatch, caplog):
    pytest.importorskip("triton")

    def no_compiler(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    if not torch.cuda.is_available():
        ones = torch.ones
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch, "ones", lambda *shape, device=None, **options: ones(*shape, **options))
    can = triton_here._tried.__wrapped__
    assert can()
    monkeypatch.setattr("rmdm.backbone.kernels.loss_and_gradient_", no_compiler)
    assert not can()
    (record,) = caplog.records
    assert record.getMessage() == (
        "Triton cannot be used (Failed to find C compiler.): kernels are not fused, and all goes more slowly"
    )
