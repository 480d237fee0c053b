from reroll.pipeline.resume import changes_of


def told(old, new):
    return [str(change) for change in changes_of(old, new)]


def test_every_leaf_that_differs_is_told_by_its_path():
    old = {"a": {"b": 1, "c": [1, 2]}, "d": None, "same": {"x": 1}}
    new = {"a": {"b": 2, "c": [1, 3]}, "d": {"kind": "own"}, "same": {"x": 1}}
    assert told(old, new) == ["a.b 1 → 2", "a.c [1, 2] → [1, 3]", "d none → {'kind': 'own'}"]


def test_what_came_or_went_is_told():
    assert told({"a": 1}, {"b": 2}) == ["b none → 2", "a 1 → none"]


def test_sections_in_a_list_are_told_by_their_place():
    old = {"data": [{"path": "x", "weight": 1.0}, {"path": "y"}]}
    new = {"data": [{"path": "x", "weight": 2.0}, {"path": "y"}]}
    assert told(old, new) == ["data.0.weight 1.0 → 2.0"]
    assert told(old, {"data": old["data"][:1]}) == [f"data {old['data']} → {old['data'][:1]}"]


def test_equal_configs_have_no_changes():
    assert told({"a": {"b": [1]}}, {"a": {"b": [1]}}) == []
