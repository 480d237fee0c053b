import subprocess
import sys
import threading
from pathlib import Path

import pytest

from reroll.errors import EnvError
from reroll_zoo.full_text import query_words
from reroll_zoo.webshop.catalogue import Catalogue
from reroll_zoo.webshop.search import MAX_RESULTS, SearchIndex, build_index, default_cache_dir, open_shop


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return Catalogue(num_products=2_000)


@pytest.fixture(scope="module")
def index(catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    path = tmp_path_factory.mktemp("index") / "shop.sqlite"
    build_index(catalogue, path)
    return SearchIndex(path)


def test_products_with_all_the_words_come_first(catalogue: Catalogue, index: SearchIndex) -> None:
    found = [catalogue.product(place) for place in index.search(("waterproof", "hiking", "boots"))]
    fitting = [product.category == "hiking boots" and "waterproof" in product.attributes for product in found]
    assert any(fitting)
    assert fitting == sorted(fitting, reverse=True)
    assert sum(fitting) == sum(p.category == "hiking boots" and "waterproof" in p.attributes for p in catalogue)


def test_every_product_is_found_by_its_title(catalogue: Catalogue, index: SearchIndex) -> None:
    for place in range(0, 2_000, 7):
        assert index.search(query_words(catalogue.product(place).title))[0] == place


def test_options_are_searched_too(catalogue: Catalogue, index: SearchIndex) -> None:
    found = index.search(query_words("face serum sandalwood scent"))
    assert "sandalwood" in [value for _, values in catalogue.product(found[0]).options for value, _ in values]


def test_singular_and_plural_find_the_same(index: SearchIndex) -> None:
    assert index.search(("hiking", "boot")) == index.search(("hiking", "boots"))


def test_words_that_no_product_has_are_passed_over(index: SearchIndex) -> None:
    assert index.search(("xyzzy", "hiking", "boots")) == index.search(("hiking", "boots"))
    assert index.search(("xyzzy",)) == ()
    assert index.search(()) == ()


def test_a_search_gives_a_bounded_number_of_different_products(index: SearchIndex) -> None:
    found = index.search(("free", "black", "color"))
    assert len(found) == len(set(found)) == MAX_RESULTS


def test_a_query_is_cut_into_plain_words() -> None:
    assert query_words('"Red" OR (blue* NEAR the_shoes) - red') == ("red", "blue", "near", "shoes")
    assert len(query_words(" ".join(map(str, range(10_000))))) == 32


def test_threads_share_an_index(index: SearchIndex) -> None:
    queries = [("boots",), ("tea",), ("chairs",), ("cables",)]
    fresh = SearchIndex(index.path)
    answers: dict[tuple[str, ...], tuple[int, ...]] = {}
    threads = [threading.Thread(target=lambda words=words: answers.update({words: fresh.search(words)})) for words in queries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {words: index.search(words) for words in queries}


def test_environments_of_a_process_share_one_shop(tmp_path: Path) -> None:
    first = open_shop(seed=0, num_products=50, cache_dir=tmp_path)
    assert open_shop(seed=0, num_products=50, cache_dir=tmp_path) is first


def test_an_index_is_built_once_and_then_read(tmp_path: Path) -> None:
    open_shop(seed=0, num_products=50, cache_dir=tmp_path)
    (path,) = tmp_path.glob("*.sqlite")
    built = path.stat().st_mtime_ns
    open_shop.cache_clear()
    open_shop(seed=0, num_products=50, cache_dir=tmp_path)
    assert path.stat().st_mtime_ns == built
    open_shop(seed=1, num_products=50, cache_dir=tmp_path)
    assert len(list(tmp_path.glob("*.sqlite"))) == 2


def test_processes_that_build_at_once_end_with_one_whole_index(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from reroll_zoo.webshop.search import open_shop;"
        "print(open_shop(seed=0, num_products=3000, cache_dir=Path(sys.argv[1]))[1].search(('boots',)))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert outputs[0].count(",") == MAX_RESULTS - 1
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".sqlite"]


def test_a_build_that_fails_leaves_nothing_that_looks_like_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Catalogue) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(Catalogue, "__iter__", fail)
    with pytest.raises(KeyboardInterrupt):
        build_index(Catalogue(num_products=50), tmp_path / "shop.sqlite")
    assert [path.name for path in tmp_path.iterdir()] == ["shop.lock"]


def test_a_broken_index_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "shop.sqlite"
    path.write_bytes(b"no database" * 1_000)
    with pytest.raises(EnvError, match=r"shop\.sqlite.*delete it"):
        SearchIndex(path).search(("boots",))


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvError, match="set cache_dir"):
        open_shop(seed=0, num_products=50, cache_dir=tmp_path / "file")


def test_the_cache_folder_follows_the_xdg_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "reroll"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "reroll"
