"""The screen of `csa2 top`: from what a server says to lines."""

import msgspec
import pytest
from top_samples import MANUAL, METRICS, MIB, STATS

from csa2.top.load import Load, quantile, sglang_samples
from csa2.top.readings import Reading, Readings
from csa2.top.screen import Span, arena_parts, bar, lines, paint


def reading(time_s=0.0, stats=STATS, load=None, documents=()):
    return Reading(time_s, stats, load, "start the server with --enable-metrics", tuple(documents), "none", time_s)


def changed(**fields):
    return msgspec.structs.replace(STATS, **fields)


def screen(*taken, width=80):
    readings = Readings()
    for one in taken:
        readings.add(one)
    return [paint(line, width, False) for line in lines("http://server", readings, width)]


def facts(*taken, width=200):
    """What follows the name of each fact."""
    return {line[:23].strip(): line[24:] for line in screen(*taken, width=width)}


def test_samples_of_sglang():
    samples = sglang_samples(METRICS)
    assert ("num_queue_reqs", {"model_name": 'a \\"quoted\\" } name'}, 2.0) in samples
    assert all(labels.get("tp_rank", "0") == "0" for _, labels, _ in samples)
    assert "python_info" not in {name for name, _, _ in samples}


def test_the_load_of_a_server():
    load = Load.parse(METRICS)
    assert (load.running, load.waiting, load.generated_tokens) == (3, 2, 1000)
    assert load.ttft_s == ((0.1, 5.0), (0.5, 10.0), (float("inf"), 10.0))
    assert Load.parse('sglang:csa2_used_bytes{model_name="demo"} 1.0') is None


@pytest.mark.parametrize(
    ("before", "after", "share", "expected"),
    [
        ((), ((0.1, 5.0), (0.5, 10.0), (float("inf"), 10.0)), 0.5, 0.1),
        ((), ((0.1, 5.0), (0.5, 10.0), (float("inf"), 10.0)), 0.95, 0.46),
        (((0.1, 5.0), (0.5, 10.0), (float("inf"), 10.0)), ((0.1, 5.0), (0.5, 14.0), (float("inf"), 14.0)), 0.5, 0.3),
        ((), ((0.1, 0.0), (float("inf"), 4.0)), 0.5, 0.1),
        (((0.1, 5.0),), ((0.1, 5.0),), 0.5, None),
        ((), (), 0.5, None),
    ],
)
def test_quantiles_follow_prometheus(before, after, share, expected):
    assert quantile(before, after, share) == (None if expected is None else pytest.approx(expected))


def test_the_screen_of_one_reading():
    pinned = changed(documents=1, pinned_pages=20, pinned_bytes=11 * MIB)
    assert screen(reading(stats=pinned, documents=[MANUAL])) == [
        "csa2 top  http://server",
        "",
        "#" * 12 + "8" * 12 + "4" * 12 + "-" + "." * 43,
        "# bf16                     16 pages     16 MiB   16.0 %",
        "8 fp8                      32 pages     16 MiB   16.0 %",
        "4 fp4                      64 pages     16 MiB   16.0 %",
        "- not used in slabs                      2 MiB    2.0 %",
        ". free                                  50 MiB   50.0 %",
        "",
        "arena in use            50.0 % of 100 MiB",
        "  in tenths, till now   5",
        "  live                  20.0 %",
        "tokens held             7168 of 25600",
        "compression             2.33x against bf16, target ratio 1.50",
        "hit rate                - in the last minute, 30.0 % since the start",
        "  found in              bf16 200, fp8 2800",
        "prompt tokens           - a second, 10000 since the start",
        "generated, first token  start the server with --enable-metrics",
        "",
        "pages demoted           - in the last minute, 75 since the start",
        "  by step               bf16->fp8 5, bf16->fp4 70",
        "tokens evicted          - in the last minute, 640 since the start",
        "pages moved             - in the last minute, 2 since the start",
        "",
        "pinned documents        1, 20 pages, 11 MiB",
        "  manual                1280 tokens, 11 MiB, 7 hits, resident (bf16 1, fp8 19)",
    ]


def test_rates_are_those_of_the_last_minute():
    later = changed(
        prompt_tokens_total=10400,
        prefix_hit_tokens_total=3300,
        evicted_tokens_total=704,
        demotions_total={"bf16->fp8": 5, "bf16->fp4": 90, "fp8->fp4": 0},
    )
    shown = facts(reading(0.0, changed(prompt_tokens_total=0)), reading(100.0), reading(150.0, later))
    assert shown["hit rate"] == "75.0 % in the last minute, 31.7 % since the start"
    assert shown["prompt tokens"] == "8.0 a second, 10400 since the start"
    assert shown["pages demoted"] == "20 in the last minute, 95 since the start"
    assert shown["tokens evicted"] == "64 in the last minute, 704 since the start"
    assert shown["in tenths, till now"] == "555"


def test_the_agreement_guard_is_shown_where_it_is_on():
    assert "agreement" not in facts(reading())
    guarded = changed(guard_compared_total=40, guard_agreed_total=39, guard_agreement=0.975, guard_backoffs_total=1)
    assert facts(reading(stats=guarded))["agreement"] == "97.5 % of the last guarded steps, backed off: 1"


def test_times_and_rates_from_metrics():
    first = Load(1000.0, 1.0, 0.0, ((0.1, 5.0), (0.5, 10.0)))
    second = Load(1200.0, 3.0, 2.0, ((0.1, 5.0), (0.5, 20.0)))
    shown = facts(reading(0.0, load=first), reading(10.0, load=second))
    assert shown["generated tokens"] == "20.0 a second, 1200 since the start"
    assert shown["time to first token"] == "300 ms median, 480 ms for 95 %"
    assert shown["requests"] == "3 running, 2 waiting"
    assert facts(reading(load=first))["time to first token"] == "100 ms median, 460 ms for 95 %"


def test_after_a_restart_counting_begins_anew():
    restarted = changed(prompt_tokens_total=100, prefix_hit_tokens_total=50)
    shown = facts(reading(0.0), reading(2.0, restarted))
    assert shown["hit rate"] == "- in the last minute, 50.0 % since the start"


@pytest.mark.parametrize("width", [20, 37, 80, 300])
def test_the_bar_has_a_column_for_everything(width):
    stats = changed(pages={"bf16": 16, "fp8": 0, "fp4": 1}, used_bytes=17 * MIB, slab_bytes=17 * MIB)
    text = paint(bar(arena_parts(stats), stats.arena_bytes, width), width, False)
    assert len(text) == width
    assert text.count("4") >= 1
    assert "8" not in text
    assert list(text) == sorted(text, key="#84-.".index)


def test_an_empty_arena_is_a_bar_of_dots():
    stats = changed(pages=dict.fromkeys(STATS.pages, 0), used_bytes=0, slab_bytes=0)
    assert paint(bar(arena_parts(stats), stats.arena_bytes, 40), 40, False) == "." * 40


def test_lines_are_cut_and_do_not_command_the_terminal():
    nasty = msgspec.structs.replace(MANUAL, state="failed", message="\x1b[2J\x07\r\nno room", formats={})
    shown = screen(reading(documents=[nasty]), width=50)
    assert max(map(len, shown)) <= 50
    text = "".join(screen(reading(documents=[nasty]), width=200))
    assert text.isprintable()
    assert "?[2J???no room" in text


def test_documents_are_counted_where_they_cannot_be_listed():
    pinned = reading(stats=changed(documents=1, pinned_pages=20, pinned_bytes=11 * MIB))
    assert facts(pinned)["pinned documents"] == "1, 20 pages, 11 MiB; none"


def test_colours_only_repeat_what_letters_say():
    line = [Span("##", 31), Span(" bf16"), Span("", 32)]
    assert paint(line, 80, True) == "\x1b[31m##\x1b[0m bf16"
    assert paint(line, 4, True) == "\x1b[31m##\x1b[0m b"
    assert paint(line, 80, False) == "## bf16"
