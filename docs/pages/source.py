"""Links to code: to the built commit of a repository, or, when none is configured, to pages of this site."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from pages.markdown import relative


def commit_of(root: Path) -> str:
    """The commit that is checked out; empty outside a repository."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return git.stdout.strip()


@dataclass
class Sources:
    """Makes links and remembers which files they cite."""

    root: Path
    repository: str  # an address, or empty
    commit: str
    cited: set[str] = field(default_factory=set)

    def link(self, path: str, page: str, line: int = 0) -> str:
        """Where `page` finds a file of the repository. FileNotFoundError if there is no such file."""
        if not (self.root / path).is_file():
            raise FileNotFoundError(f"{page} links to {path}, which does not exist")
        if self.repository:
            return f"{self.repository}/blob/{self.commit or 'HEAD'}/{path}" + (f"#L{line}" if line else "")
        self.cited.add(path)
        return relative(f"source/{path}.md", page) + (f"#L{line}" if line else "")

    def pages(self) -> dict[str, str]:
        """A page for each cited file, by its place on the site."""
        return {f"source/{path}.md": self._page(path) for path in sorted(self.cited)}

    def _page(self, path: str) -> str:
        at = f" at commit `{self.commit[:10]}`" if self.commit else ""
        head = f"---\ntitle: {path}\nhide: [navigation, toc]\nsearch: {{exclude: true}}\n---\n\n"
        return f"{head}# {Path(path).name} {{ .wide }}\n\n`{path}`{at}\n"

    def below(self, place: str) -> str:
        """The code of a page of `pages`, as HTML to stand below it; empty for another page.

        It does not go through Markdown, which would take apart each of its tags: a fifth of the time of a build.
        """
        path = place.removeprefix("source/").removesuffix(".md")
        return numbered((self.root / path).read_text("utf-8")) if place == f"source/{path}.md" else ""


def numbered(text: str) -> str:
    """Python source as HTML; line 12 has the id `L12`, as at the usual hosts of repositories."""
    coloured = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    lines = [f'<span id="L{n}" class="line">{line}\n</span>' for n, line in enumerate(coloured.splitlines(), 1)]
    return f'<div class="highlight source"><pre><code>{"".join(lines)}</code></pre></div>'
