"""Registration process by process: light where nothing of ours runs, complete where it does, loud when it is not."""

import subprocess
import sys
import textwrap
from importlib.metadata import entry_points

import pytest
from resolving import upstream  # loads the plugins as a launcher does
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from csa2.errors import IntegrityError
from sglang_csa2 import plugin
from sglang_csa2.args import Csa2ServerArgs
from sglang_csa2.plugin import Hook


class Target:
    """Something to hook."""

    def method(self) -> str:
        return "method"

    def other(self) -> str:
        return "other"


PATH = f"{__name__}.Target."


def run_python(code: str) -> list[str]:
    """The lines that `code` prints in a fresh process."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture
def hooks(monkeypatch):
    """Two hooks that SGLang's registry applied, and a restored target afterwards."""
    calls = (
        Hook(f"{PATH}method", lambda result, self: result + " after", "AFTER"),
        Hook(f"{PATH}other", lambda orig, self: orig(self) + " around", "AROUND"),
    )
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(Target, "method", Target.method)
    monkeypatch.setattr(Target, "other", Target.other)
    plugin._apply(calls)
    return calls


def test_entry_point_names():
    names = {point.name: point.value for point in entry_points(group="sglang.srt.plugins")}
    assert names["csa2"] == "sglang_csa2.plugin:register"


def test_registration_is_complete_and_repeatable():
    assert plugin.registration_complete()
    plugin.require_registration()
    before = {target: len(hooks) for target, hooks in HookRegistry._hooks.items()}
    plugin.register()
    assert {target: len(hooks) for target, hooks in HookRegistry._hooks.items()} == before
    assert upstream.ServerArgs is Csa2ServerArgs


def test_failed_registration_keeps_its_reason(monkeypatch):
    monkeypatch.setattr(plugin, "_registration", plugin._Registration())

    def fail():
        raise ImportError("the reason")

    monkeypatch.setattr(plugin, "_register_arguments", fail)
    with pytest.raises(ImportError, match="the reason"):
        plugin.register()
    assert not plugin.registration_complete()
    with pytest.raises(IntegrityError, match=r"not registered completely in this process: ImportError\('the reason'\)"):
        plugin.require_registration()
    with pytest.raises(IntegrityError, match="the reason"):
        plugin.require_hooks()


def test_registration_that_never_ran_is_reported(monkeypatch):
    monkeypatch.setattr(plugin, "_registration", plugin._Registration())
    with pytest.raises(IntegrityError, match="not registered completely in this process"):
        plugin.require_hooks()


def test_applied_hooks_are_found(hooks):
    assert Target().method() == "method after"
    assert Target().other() == "other around"
    assert plugin._not_applied(hooks) == []


def test_hook_under_those_of_other_plugins_is_found(hooks):
    source = HookSource("other", "other")
    HookRegistry._patched.discard(f"{PATH}method")
    HookRegistry._hooks.clear()
    HookRegistry.register(f"{PATH}method", lambda result, self: result + " other", HookType.AFTER, source=source)
    HookRegistry.apply_hooks()
    assert Target().method() == "method after other"
    assert plugin._not_applied(hooks) == []


def test_target_replaced_behind_our_back_is_named(hooks, monkeypatch):
    monkeypatch.setattr(Target, "other", lambda self: "replaced")
    assert plugin._not_applied(hooks) == [f"{PATH}other"]


def test_hook_that_sglang_failed_to_apply_is_named(monkeypatch):
    from sglang.srt.mem_cache import registry

    monkeypatch.setattr(plugin, "_scheduler_hooks", lambda: (Hook(f"{PATH}method", print, "AFTER"),))
    monkeypatch.setattr(registry, "_RADIX_CACHE_REGISTRY", {})
    with pytest.raises(IntegrityError) as missing:
        plugin.require_hooks()
    message = str(missing.value)
    assert f"SGLang did not apply {PATH}method" in message
    assert "radix cache backend csa2" in message


def test_launcher_process_loads_arguments_only():
    lines = run_python(
        """
        import sys
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang_csa2 import plugin
        print(plugin.registration_complete())
        heavy = ("sglang.srt.managers.scheduler", "sglang.srt.entrypoints.http_server",
                 "sglang_csa2.scheduler", "sglang_csa2.memory", "sglang_csa2.attention", "sglang_csa2.control")
        print([name for name in heavy if name in sys.modules])
        """
    )
    assert lines == ["True", "[]"]


def test_scheduler_process_has_every_hook_and_the_launcher_its_routes():
    lines = run_python(
        """
        import sglang.srt.managers.scheduler
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang_csa2 import plugin
        from sglang_csa2.args import Csa2ServerArgs
        plugin.require_hooks()
        print(Engine.server_args_class is Csa2ServerArgs)
        hooks = [(hook.target, hook.function) for hook in plugin._scheduler_hooks()]
        print(len(hooks) == len(set(hooks)))
        plugin.wire_launcher()
        plugin.wire_launcher()
        print(plugin._not_applied(plugin._launcher_hooks()))
        """
    )
    assert lines == ["True", "True", "[]"]
