"""What README.md and docs/ tell people to type: fenced blocks, commands in them, code in the running text, links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
QUOTE = re.compile(r"^\*\*`(.+)`\*\*$", re.MULTILINE)
REMARK = re.compile(r"\s{5,}(?:(?!\s{5,}).)*$")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages() -> list[str]:
    """README.md and every page of docs/, as paths from the root."""
    return ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the number of its first line, and what the fence says of it."""

    page: str
    line: int
    language: str
    title: str | None
    """The file that the block shows."""
    body: str

    @property
    def place(self) -> str:
        """Where it is, as editors open it."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command as it stands on its page, continued lines joined."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        """Where it is, as editors open it."""
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    """The page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text, found = read(page), []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text.count("\n", 0, match.start("body")) + 1
        found.append(Block(page, line, language, title[1] if title else None, match["body"]))
    return found


def commands(block: Block) -> list[Command]:
    """What people are to type of a block.

    In `console` that is what follows `$ `, in `sh` and `bash` every line, elsewhere lines that begin with `rmdm`, of
    which the last five spaces and what follows them are a remark. A backslash continues a line. A block with a title
    shows a file and is nothing to type.
    """
    found: list[Command] = []
    if block.title is not None:
        return found
    lines = enumerate(block.body.splitlines(), block.line)
    for number, line in lines:
        if block.language == "console":
            text = line.removeprefix("$ ") if line.startswith("$ ") else ""
        elif block.language in ("sh", "bash"):
            text = line
        elif block.language in ("", "text"):
            text = REMARK.sub("", line) if line.startswith("rmdm ") else ""
        else:
            text = ""
        text = text.strip()
        while text.endswith("\\"):
            text = text[:-1].rstrip() + " " + next(lines)[1].removeprefix(">").strip()
        if text and not text.startswith("#"):
            found.append(Command(block.page, number, text))
    return found


def inline(page: str) -> list[str]:
    """Code in the running text; lines that quote a message in bold are none."""
    prose = QUOTE.sub("", FENCE.sub("", read(page)))
    return [" ".join(code.split()) for code in INLINE.findall(prose)]


def messages(page: str) -> list[str]:
    """The messages a page quotes, each a bold line of its own."""
    return QUOTE.findall(read(page))


def links(page: str) -> list[str]:
    """Where the links and pictures of a page lead, but for other sites."""
    prose = FENCE.sub("", read(page))
    return [link for link in LINK.findall(INLINE.sub("", prose)) if "://" not in link]
