"""What the page of /csa2/dashboard shows, in a real browser, against a server whose answers are made up."""

import copy
import json

import msgspec
from browser import Browser
from dashboard_server import DOCUMENT, STATS, DashboardServer
from page_watch import DASH, facts, renew, wait_live, wait_readings

from csa2.documents import DocumentView
from csa2.stats import CacheStats

METRICS = """# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="demo",pid="7",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="demo",pid="8",tp_rank="1"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="a \\"quoted\\" } name",tp_rank="0"} 2.0
sglang:generation_tokens_total{model_name="demo"} GENERATED
sglang:time_to_first_token_seconds_sum{model_name="demo"} 9.0
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="demo"} FAST
sglang:time_to_first_token_seconds_bucket{le="0.5",model_name="demo"} SLOW
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="demo"} SLOW
sglang:time_to_first_token_seconds_count{model_name="demo"} SLOW
"""


def metrics(generated: int, fast: int, slow: int) -> str:
    text = METRICS.replace("GENERATED", str(float(generated)))
    return text.replace("FAST", str(float(fast))).replace("SLOW", str(float(slow)))


def test_the_arena_by_format(browser: Browser) -> None:
    wait_live(browser)
    assert browser.rows("formats") == [
        ["bf16", "16", "1,048,576", "16 MiB", "16.0 %", "200"],
        ["fp8", "32", "524,288", "16 MiB", "16.0 %", "2,300"],
        ["fp4", "64", "262,144", "16 MiB", "16.0 %", "500"],
        ["not used in slabs", DASH, DASH, "2 MiB", "2.0 %", DASH],
        ["free", DASH, DASH, "50 MiB", "50.0 %", DASH],
    ]
    classes = browser.run("[...document.querySelectorAll('#map rect')].map(r => r.getAttribute('class'))")
    assert classes == ["f0"] * 40 + ["f1"] * 40 + ["f3"] * 40 + ["waste"] * 5 + ["free"] * 125
    assert browser.text("#map-text") == (
        "100 MiB, one block is 410 KiB: bf16 16.0 %, fp8 16.0 %, fp4 16.0 %, not used in slabs 2.0 %, free 50.0 %."
    )
    assert browser.run("document.title") == "50.0 % of the arena · csa2 cache"


def test_the_numbers_on_top(browser: Browser) -> None:
    wait_live(browser)
    shown = facts(browser)
    assert shown["Arena in use"] == ("50.0 %", "50 MiB of 100 MiB")
    assert shown["Compression"] == ("2.33x", "against bf16")
    assert shown["Target ratio"] == ("1.50x", "of old pages, automatic")
    assert shown["Hit rate"] == (DASH, "last minute; 30.0 % since the start")
    assert shown["Tokens held"] == ("7,168", "of 25,600")
    assert "Pinned documents" not in shown


def test_counts_of_documents_are_shown_where_the_server_has_them(browser: Browser, server: DashboardServer) -> None:
    server.stats |= {"documents": 2, "pinned_pages": 30, "pinned_bytes": 2**20}
    browser.wait("documents", lambda: facts(browser).get("Pinned documents") == ("2", "30 pages, 1 MiB"))


def test_the_agreement_guard_is_shown_where_it_is_on(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    assert "Agreement" not in facts(browser)
    server.stats |= {"guard_compared_total": 40, "guard_agreement": 0.975}
    browser.wait("agreement", lambda: facts(browser).get("Agreement") == ("97.5 %", "of guarded steps"))


def test_demotions_and_evictions(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    wait_readings(browser, server)
    later = copy.deepcopy(STATS)
    later["demotions_total"]["bf16->fp4"] += 30
    later["evicted_tokens_total"] += 64
    server.stats = later
    browser.wait("a demotion", lambda: browser.rows("pressure")[0] == ["Pages demoted", "30", "108"])
    assert browser.rows("pressure")[1:] == [
        ["bf16 to fp8", "0", "5"],
        ["bf16 to fp4", "30", "100"],
        ["fp8 to fp4", "0", "3"],
        ["Tokens evicted", "64", "704"],
        ["Pages moved to empty slabs", "0", "2"],
    ]


def test_the_hit_rate_is_that_of_the_last_minute(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    server.stats |= {"prompt_tokens_total": 10400, "prefix_hit_tokens_total": 3300}
    browser.wait("hit rate", lambda: facts(browser)["Hit rate"][0] == "75.0 %")
    assert "prompt tokens found 75.0 %" in browser.text("#charts")


def test_curves_grow_and_are_told_in_words(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    wait_readings(browser, server)
    server.stats["pages"]["fp4"] = 80
    browser.wait("curve", lambda: "fp4 16 MiB to 20 MiB" in browser.text("#c-arena-text"))
    drawn = "[...document.querySelectorAll('#charts .area')].map(p => p.getAttribute('d'))"
    paths = browser.run(drawn)
    assert len(paths) == 5
    assert all(path.endswith("100Z") for path in paths)
    assert "NaN" not in "".join(paths)


def test_curves_as_a_table(browser: Browser) -> None:
    wait_live(browser)
    assert browser.rows("readings") == []
    browser.run("document.querySelector('#past').open = true")
    row = browser.wait("table", lambda: browser.rows("readings"))[0]
    heads = browser.run("[...document.querySelectorAll('#readings thead th')].map(h => h.textContent)")
    assert len(row) == len(heads) == 15
    assert dict(zip(heads, row, strict=True))["Arena over time: fp8"] == "16 MiB"


def test_without_metrics_the_page_says_how_to_get_them(browser: Browser) -> None:
    wait_live(browser)
    told = "start the server with --enable-metrics."
    browser.wait("note", lambda: browser.text("#metrics-note").endswith(told))
    assert browser.run("document.querySelector('#metrics-note').hidden") is False
    assert facts(browser)["Time to first token"][0] == DASH


def test_times_and_rates_from_metrics(browser: Browser, server: DashboardServer) -> None:
    server.metrics = metrics(1000, 40, 50)
    wait_live(browser)
    renew(browser)
    browser.wait("requests", lambda: facts(browser)["Requests"] == ("3 running", "2 waiting"))
    assert browser.run("document.querySelector('#metrics-note').hidden") is True
    # 10 more, of which 5 took up to 0.1 s: the median is there, 95 % at nine tenths of the bucket above.
    server.metrics = metrics(1400, 45, 60)
    renew(browser)
    browser.wait(
        "TTFT", lambda: facts(browser)["Time to first token"] == ("100 ms", "median of the last minute; 95 %: 460 ms")
    )
    assert float(facts(browser)["Generated a second"][0].replace(",", "")) > 0


def test_the_list_of_documents(browser: Browser, server: DashboardServer) -> None:
    server.documents.append(
        copy.deepcopy(DOCUMENT) | {"id": "b", "state": "failed", "message": "no room", "ttl": 60.0, "formats": {}}
    )
    wait_live(browser)
    renew(browser)
    browser.wait("documents", lambda: len(browser.rows("documents")) == 2)
    assert browser.rows("documents") == [
        ["manual", "resident", "1,280", "11 MiB", "7", "bf16 1, fp8 19", "until removed"],
        ["b", "failed: no room", "1,280", "11 MiB", "7", DASH, "60"],
    ]
    server.documents.clear()
    renew(browser)
    browser.wait("none", lambda: browser.text("#documents-note") == "None is pinned.")


def test_an_answer_that_makes_no_sense_is_told(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    server.documents = None
    renew(browser)
    browser.wait("note", lambda: browser.text("#documents-note").startswith("The list could not be read ("))
    server.stats = None
    browser.wait("state", lambda: browser.text("#state").startswith("The answer of the server cannot be shown ("))


def test_text_of_the_server_is_no_markup(browser: Browser, server: DashboardServer) -> None:
    nasty = "<img src=x onerror=alert(1)><script>document.title='owned'</script>"
    server.documents[0] |= {"id": nasty, "message": nasty, "formats": {nasty: 1}}
    server.stats["pages"] = {"bf16": 1, nasty: 2}
    server.stats["options"][nasty] = nasty
    server.stats["demotions_total"][nasty] = 1
    wait_live(browser)
    renew(browser)
    browser.wait("document", lambda: browser.rows("documents")[:1] and browser.rows("documents")[0][0] == nasty)
    browser.wait("format", lambda: browser.rows("formats")[1][0] == nasty)
    assert browser.run("document.querySelectorAll('img, main script').length") == 0
    assert "owned" not in browser.run("document.title")


def test_a_server_started_again_with_other_formats(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    server.stats |= {"pages": {"bf16": 4}, "used_bytes": 4 * 2**20, "slab_bytes": 4 * 2**20}
    browser.wait("formats", lambda: [row[0] for row in browser.rows("formats")] == ["bf16", "not used in slabs", "free"])
    browser.wait("curve", lambda: browser.text("#c-arena-text").startswith("bf16 4 MiB to 16 MiB, not used"))
    assert browser.run("document.querySelectorAll('#charts > section').length") == 5
    assert browser.run("document.querySelector('#charts > section h2').id") == "c-arena"


def test_a_server_that_fails_is_told_and_asked_again(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    server.status = 503
    told = "The server answers with status 503: the scheduler is busy. Trying again."
    browser.wait("failure", lambda: browser.text("#state") == told)
    server.status = 200
    browser.wait("recovery", lambda: browser.text("#state") == "Live, every 2 seconds.")


def test_after_a_restart_counting_begins_anew(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    wait_readings(browser, server)
    server.stats |= {"prompt_tokens_total": 5, "prefix_hit_tokens_total": 1}
    browser.wait("restart", lambda: facts(browser)["Hit rate"] == (DASH, "last minute; 20.0 % since the start"))


def test_the_answer_is_what_the_scheduler_says(browser: Browser, server: DashboardServer) -> None:
    """Names of fields are those of CacheStats and DocumentView, which the real server answers with."""
    wait_live(browser)
    # A field that another version adds is no fault of what is made up here.
    known = set(CacheStats.__struct_fields__)
    assert set(STATS) <= known
    msgspec.convert(DOCUMENT, DocumentView)
    assert json.loads(json.dumps(server.stats)) == STATS
