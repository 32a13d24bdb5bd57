"""docs/traps.md is what the marks `trap` of the tests say, and they are many."""

from tools import peer_traps, traps

LEAST = 60


def test_the_page_is_what_the_marks_say():
    assert traps.PAGE.read_text() == traps.page(), "run tools/traps"


def test_every_mark_has_a_name_a_thread_a_cost_and_an_answer():
    found = traps.traps()
    assert len(found) >= LEAST
    assert len({trap.name for trap in found}) == len(found)
    for trap in found:
        assert traps.THREAD.fullmatch(trap.thread), trap
        assert trap.name and trap.cost and trap.answer and "|" not in trap.row()[2:-2].replace(" | ", ""), trap


def test_what_a_peer_is_asked_is_a_trap_of_the_page():
    known = {trap.name for trap in traps.traps()}
    assert {name for checks in peer_traps.CHECKS.values() for name in checks} <= known
