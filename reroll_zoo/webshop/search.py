"""Full-text search over a catalogue: an SQLite FTS5 index in a file, built once, then read by every environment."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from reroll.errors import EnvError
from reroll_zoo.full_text import TOKENIZE, all_of, any_of
from reroll_zoo.webshop.catalogue import Catalogue, Product

MAX_RESULTS = 50
_MAX_RANKED_ROWS = 100_000
_COLUMNS = "title, properties, description"
_SCHEMA = f"CREATE VIRTUAL TABLE products USING fts5({_COLUMNS}, content='', tokenize='{TOKENIZE}')"
# The title says most about a product, the description least.
_RANK = "bm25(products, 4.0, 2.0, 1.0)"


def default_cache_dir() -> Path:
    """Where indexes are kept: $XDG_CACHE_HOME/reroll, or ~/.cache/reroll."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reroll"


class SearchIndex:
    """An open index. Safe to share: every thread reads through a connection of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        # Sibling episodes ask for the same.
        self._num_products_with = lru_cache(maxsize=4096)(self._count)
        self._found = lru_cache(maxsize=4096)(self._find)

    def search(self, words: tuple[str, ...]) -> tuple[int, ...]:
        """Indices of the products that match these words, best first, at most MAX_RESULTS."""
        return self._found(words)

    def _find(self, words: tuple[str, ...]) -> tuple[int, ...]:
        """Products with all the words first. While they are too few, the commonest word is given up; at last any word does."""
        counts = {word: count for word in words if (count := self._num_products_with(word))}
        rarest_first = sorted(counts, key=counts.__getitem__)
        found: dict[int, None] = {}
        for num_words in range(len(rarest_first), 0, -1):
            found |= dict.fromkeys(self._match(all_of(rarest_first[:num_words])))
            if len(found) >= MAX_RESULTS:
                return tuple(found)[:MAX_RESULTS]
        # Ranking costs time for every product with any of the words: the common ones tell little and would cost most.
        num_rows = itertools.accumulate(counts[word] for word in rarest_first)
        affordable = [word for word, rows in zip(rarest_first, num_rows, strict=True) if rows <= _MAX_RANKED_ROWS]
        if len(affordable) > 1:
            found |= dict.fromkeys(self._match(any_of(affordable)))
        return tuple(found)[:MAX_RESULTS]

    def _count(self, word: str) -> int:
        (count,) = self._rows("SELECT count(*) FROM products WHERE products MATCH ?", all_of([word]))[0]
        return count

    def _match(self, expression: str) -> list[int]:
        statement = f"SELECT rowid FROM products WHERE products MATCH ? ORDER BY {_RANK}, rowid LIMIT {MAX_RESULTS}"
        return [rowid for (rowid,) in self._rows(statement, expression)]

    def _rows(self, statement: str, expression: str) -> list[tuple[int]]:
        try:
            return self._connection().execute(statement, (expression,)).fetchall()
        except sqlite3.Error as error:
            raise EnvError(f"the search index {self.path} cannot be read ({error}): delete it, it is built again") from error

    def _connection(self) -> sqlite3.Connection:
        # A connection must not cross a fork, so the child opens its own.
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.connection = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
            self._local.pid = os.getpid()
        connection: sqlite3.Connection = self._local.connection
        return connection


@lru_cache(maxsize=8)
def open_shop(*, seed: int, num_products: int, cache_dir: Path) -> tuple[Catalogue, SearchIndex]:
    """A catalogue and its index in this folder, built if it is not there. Environments of one process share both."""
    catalogue = Catalogue(seed=seed, num_products=num_products)
    path = cache_dir / f"webshop-{seed}-{num_products}-{_fingerprint(catalogue)}.sqlite"
    if not path.exists():
        try:
            build_index(catalogue, path)
        except (OSError, sqlite3.Error) as error:
            raise EnvError(f"the search index {path} cannot be built ({error}): set cache_dir to a folder with room") from error
    return catalogue, SearchIndex(path)


def build_index(catalogue: Catalogue, path: Path) -> None:
    """Write the index. It gets its name when it is whole; of several builders one works and the others wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(path), tempfile.TemporaryDirectory(dir=path.parent, prefix="webshop-build-") as folder:
        if path.exists():
            return
        unfinished = Path(folder) / path.name
        with contextlib.closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=OFF")
            connection.execute("PRAGMA synchronous=OFF")
            # Only the index is stored: a product's page is made from its row number.
            connection.execute(_SCHEMA)
            connection.execute("BEGIN")
            connection.executemany(
                f"INSERT INTO products(rowid, {_COLUMNS}) VALUES (?, ?, ?, ?)",
                ((index, *_document(product)) for index, product in enumerate(catalogue)),
            )
            connection.execute("INSERT INTO products(products) VALUES ('optimize')")
            connection.execute("COMMIT")
        unfinished.replace(path)


@contextlib.contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("w") as lock:
        # Some network file systems cannot lock. Then builders work side by side, and renaming still keeps the file whole.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _document(product: Product) -> tuple[str, str, str]:
    options = [f"{name} {' '.join(value for value, _ in values)}" for name, values in product.options]
    return product.title, " ".join((*product.attributes, *options)), product.description


def _fingerprint(catalogue: Catalogue) -> str:
    """Changes with the words products are made from and with the index's layout, so that no index of other text is read."""
    sampled = range(0, catalogue.num_products, max(1, catalogue.num_products // 64))
    documents = [_document(catalogue.product(index)) for index in sampled]
    return hashlib.sha256(repr((_SCHEMA, documents)).encode()).hexdigest()[:12]
