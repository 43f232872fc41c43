"""A hook of mkdocs: the documents of the project's root become pages, and links to them follow.

Documents are written so that their links work where the repository is read; on the site all
pages are in one tree, and files that are not pages have no address.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
FROM_ROOT = {
    f"{name}.md": f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CHANGELOG")
}
FROM_ROOT["README.md"] = "index.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^):#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the root."""
    for name, page in FROM_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links into the tree of the repository to those of the site."""
    source = Path(page.file.src_uri)
    generated = source.name in FROM_ROOT.values()
    here = ROOT if generated else ROOT / "docs" / source.parent
    up = "../" * len(source.parent.parts)

    def turned(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = (here / target).resolve()
        if path.parent == ROOT and path.name in FROM_ROOT:
            return f"[{text}]({up}{FROM_ROOT[path.name]}{anchor})"
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({up}{path.relative_to(ROOT / 'docs')}{anchor})"
        return text if path.exists() else match[0]

    return LINK.sub(turned, markdown)
