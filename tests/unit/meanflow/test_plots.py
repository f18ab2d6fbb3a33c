import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from rmdm.errors import ConfigError, DataError
from rmdm.meanflow import plots
from rmdm.meanflow.gaussianity import normal


def png_size(path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_clusters_are_recovered_and_ordered_by_size():
    pytest.importorskip("sklearn")
    truth = np.repeat([0, 1, 2], [50, 30, 20])
    e_NGD = 0.1 * normal((100, 2, 4), 0) + 3 * torch.eye(4)[torch.from_numpy(truth)][:, None]
    assert np.array_equal(plots.topic_clusters(e_NGD, 3), truth)
    with pytest.raises(ConfigError, match="11 clusters"):
        plots.topic_clusters(e_NGD, 11)


def test_the_umap_figure_shows_both_sides(tmp_path):
    pytest.importorskip("umap")
    pytest.importorskip("matplotlib")
    e_NGD = normal((24, 2, 3), 0)
    path = plots.figure_umap(e_NGD, normal((24, 2, 3), 1), np.arange(24) % 3, tmp_path / "new" / "umap.png")
    assert png_size(path) == (1500, 1500)
    with pytest.raises(DataError, match="24 rows of e for 20 of z_0"):
        plots.figure_umap(e_NGD, e_NGD[:20], None, path)


def test_the_qq_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = plots.figure_qq(normal((200, 2, 3), 0), 1.3 * normal((200, 2, 3), 1), tmp_path / "qq.png")
    assert png_size(path) == (1800, 780)


def test_bands_and_densities_are_the_closed_forms():
    x_P, band_P = plots.normal_quantiles(np.array([0.025, 0.5]), 400)
    assert x_P.tolist() == pytest.approx([-1.95996, 0], abs=1e-4)
    assert band_P[1] == pytest.approx(1.96 * np.sqrt(np.pi / 2 / 400), rel=1e-3)
    points = np.array([0.5, 3.0, 22.6])
    for k in (1, 16, 512):
        assert plots.chi_density(points, k).tolist() == pytest.approx(stats.chi(k).pdf(points).tolist(), rel=1e-6)


def test_importing_the_module_loads_no_plotting_library():
    code = "import sys, rmdm.meanflow.plots; sys.exit(any(m in sys.modules for m in ('matplotlib', 'umap', 'sklearn')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_missing_extra_is_an_error_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"figures need matplotlib.*pip install matplotlib"):
        plots.figure_qq(normal((20, 1, 2), 0), normal((20, 1, 2), 1), tmp_path / "qq.png")
