"""What the ready-made actions do about an alert; schedules and checkpoints do not notice."""

from __future__ import annotations

import copy
import http.server
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from auditor import GradeMonitor
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.errors import AuditorError
from auditor.explain.checkpoints import registered
from auditor.measure.grading import Alert, Policy
from auditor.record import actions
from auditor.record.actions import CutLearningRate, Log, RequestCheckpoint, StopTraining
from auditor.record.checkpoints import append_checkpoint
from auditor.record.webhook import QUEUE_ALERTS, Webhook


def alert(level: str = "watch", step: int = 100, **fields: Any) -> Alert:
    known = {"grade": 4, "ratio": 0.45, "layer": 1, "signal": "grade"}
    return Alert(step=step, level=level, **{**known, "message": f"{level} at {step}", **fields})


class Monitor:
    """What an action sees of a monitor."""

    def __init__(self, last_step: int | None = 120) -> None:
        self.should_stop = False
        self.last_step = last_step
        self.checkpoints: list[tuple[Any, int]] = []

    def checkpoint(self, path: Any, step: int) -> None:
        self.checkpoints.append((path, step))


# -- log, stop, checkpoint -------------------------------------------------------------------


def test_log_says_every_alert_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="auditor"):
        Log(logging.INFO)(alert("watch", message="S4 in block 3"), Monitor())
        Log(logging.INFO)(alert("recovered", message="S6 again"), Monitor())
    assert [record.getMessage() for record in caplog.records] == [
        "auditor: S4 in block 3",
        "auditor: S6 again",
    ]


@pytest.mark.parametrize(
    ("at", "level", "stops"),
    [
        ("danger", "watch", False),
        ("danger", "danger", True),
        ("danger", "recovered", False),
        ("watch", "watch", True),
        ("watch", "danger", True),
        ("watch", "recovered", False),
    ],
)
def test_stop_training_sets_a_flag_from_its_level_on(at: str, level: str, stops: bool) -> None:
    monitor = Monitor()
    StopTraining(at=at)(alert(level), monitor)
    assert monitor.should_stop is stops


def test_a_checkpoint_is_of_the_step_it_is_saved_at_and_registered() -> None:
    saved: list[int] = []

    def save(step: int) -> str:
        saved.append(step)
        return f"step_{step}.pt"

    action = RequestCheckpoint(save, cooldown_steps=500)
    monitor = Monitor(last_step=120)
    action(alert("watch", step=100), monitor)
    monitor.last_step = 619
    action(alert("danger", step=600), monitor)  # within the cooldown
    monitor.last_step = 620
    action(alert("recovered", step=620), monitor)
    assert saved == [120]
    action(alert("danger", step=620), monitor)
    assert monitor.checkpoints == [("step_120.pt", 120), ("step_620.pt", 620)]


def test_a_checkpoint_that_failed_is_tried_again_at_the_next_alert() -> None:
    outcomes: list[Any] = [OSError("disk full"), None, "a.pt"]

    def save(step: int) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    action, monitor = RequestCheckpoint(save, cooldown_steps=0), Monitor(last_step=None)
    with pytest.raises(OSError, match="disk full"):
        action(alert(step=1), monitor)
    action(alert(step=2), monitor)
    assert monitor.checkpoints == []  # None: nothing to register
    action(alert(step=3), monitor)
    assert monitor.checkpoints == [("a.pt", 3)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: StopTraining(at="recovered"),
        lambda: RequestCheckpoint(lambda step: None, at="S3"),
        lambda: RequestCheckpoint(lambda step: None, cooldown_steps=-1),
        lambda: CutLearningRate(sgd()[0], factor=1.0),
        lambda: CutLearningRate(sgd()[0], severe_factor=0.0),
        lambda: CutLearningRate(sgd()[0], factor=math.nan),
        lambda: CutLearningRate(sgd()[0], steps=0),
        lambda: CutLearningRate(object()),
        lambda: Webhook("https://a.example", format="xml"),
        lambda: Webhook("https://a.example", timeout_s=0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"must|cannot"):
        make()


# -- the learning rate -----------------------------------------------------------------------


def sgd(
    lr: float | torch.Tensor = 1.0, n_groups: int = 1
) -> tuple[torch.optim.SGD, list[nn.Parameter]]:
    """Plain SGD on parameters with a gradient of one: a step takes the learning rate away."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(n_groups)]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    return torch.optim.SGD([{"params": [p]} for p in parameters], lr=lr), parameters


def taken(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> float:
    """The learning rate that a step really had."""
    before = parameter.item()
    optimizer.step()
    return before - parameter.item()


def test_a_cut_lasts_its_steps_and_the_hooks_are_idle_after_it() -> None:
    optimizer, (parameter,) = sgd()
    cut = CutLearningRate(optimizer, factor=0.5, steps=3)
    assert taken(optimizer, parameter) == 1.0
    cut(alert("watch"), Monitor())
    assert cut.active_factor == 0.5
    assert [taken(optimizer, parameter) for _ in range(3)] == pytest.approx([0.5] * 3)
    assert cut.active_factor == 1.0
    assert [taken(optimizer, parameter) for _ in range(3)] == pytest.approx([1.0] * 3)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_state_dict_post_hooks
    cut.close()
    assert not optimizer._optimizer_step_post_hooks


def test_danger_cuts_to_a_third_and_alerts_prolong_without_stacking() -> None:
    optimizer, (parameter,) = sgd()
    cut = CutLearningRate(optimizer, factor=0.5, steps=4)
    cut(alert("watch"), Monitor())
    assert taken(optimizer, parameter) == pytest.approx(0.5)
    cut(alert("watch"), Monitor())
    assert taken(optimizer, parameter) == pytest.approx(0.5)  # not a quarter
    cut(alert("danger"), Monitor())
    assert taken(optimizer, parameter) == pytest.approx(1 / 3)
    cut(alert("watch"), Monitor())  # the lower factor goes on, for four more steps
    cut(alert("recovered"), Monitor())
    assert [taken(optimizer, parameter) for _ in range(5)] == pytest.approx([1 / 3] * 4 + [1.0])


def test_a_cut_at_danger_leaves_a_watched_run_alone() -> None:
    optimizer, (parameter,) = sgd()
    CutLearningRate(optimizer, at="danger")(alert("watch"), Monitor())
    assert taken(optimizer, parameter) == 1.0


@pytest.mark.parametrize("signal", ["sample_rank", "memorisation"])
def test_poor_data_is_no_reason_to_cut_the_learning_rate(signal: str) -> None:
    optimizer, (parameter,) = sgd()
    CutLearningRate(optimizer)(alert("watch", signal=signal), Monitor())
    assert taken(optimizer, parameter) == 1.0


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "closed form": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)),
    "from the current value": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "multiplicative": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda s: 0.95),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "one after another": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=5),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
        ],
        milestones=[5],
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ConstantLR(o, 0.5, total_iters=4),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["float", "shared tensor", "tensors"])
def test_a_schedule_sees_its_own_values_all_along(schedule: str, kind: str) -> None:
    """Against the same schedule on an optimizer that is never cut."""

    def rates(cut_at: int | None) -> tuple[list[float], list[float]]:
        optimizer, parameters = sgd(1.0 if kind == "float" else torch.tensor(1.0), n_groups=2)
        if kind == "tensors":
            optimizer.param_groups[1]["lr"] = torch.tensor(1.0)
        tensors = [group["lr"] for group in optimizer.param_groups]
        scheduler = SCHEDULES[schedule](optimizer)
        cut = CutLearningRate(optimizer, factor=0.25, steps=6)
        own, real = [], []
        for step in range(15):
            if step == cut_at:
                cut(alert("watch"), Monitor())
            real.append(taken(optimizer, parameters[1]))
            own.append(float(optimizer.param_groups[1]["lr"]))
            scheduler.step()
        for group, tensor in zip(optimizer.param_groups, tensors, strict=True):
            assert kind == "float" or group["lr"] is tensor
        assert cut.failures == 0
        return own, real

    own, real = rates(cut_at=4)
    expected, _ = rates(cut_at=None)
    assert own == expected
    factors = [1.0] * 4 + [0.25] * 6 + [1.0] * 5
    assert real == pytest.approx([f * one for f, one in zip(factors, expected, strict=True)], 1e-4)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_adam_in_its_variants_moves_by_the_cut_rate(options: dict[str, Any]) -> None:
    """The update of Adam is proportional to the learning rate: an optimizer made with the cut rate
    is the truth."""

    def moved(lr: float, cut: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
        if cut:
            CutLearningRate(optimizer, factor=0.25)(alert("watch"), Monitor())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return model.weight.detach()

    torch.testing.assert_close(moved(0.1, cut=True), moved(0.025, cut=False))


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_a_saved_optimizer_never_holds_the_cut(as_tensor: bool, tmp_path: Path) -> None:
    """Saved between steps, from a hook inside a step, and after a step that raised."""
    optimizer, (parameter,) = sgd(torch.tensor(1.0) if as_tensor else 1.0)
    saved: list[dict[str, Any]] = []

    def save(*_: Any) -> None:
        saved.append(copy.deepcopy(optimizer.state_dict()))

    optimizer.register_step_post_hook(save)
    cut = CutLearningRate(optimizer, factor=0.5, steps=10)
    cut(alert("watch"), Monitor())
    in_the_middle = optimizer.register_step_pre_hook(save)  # after ours: the rate is cut just now
    taken(optimizer, parameter)
    in_the_middle.remove()
    save()

    def raises(*_: Any) -> None:
        raise RuntimeError("out of memory")

    failing = optimizer.register_step_pre_hook(raises)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    failing.remove()
    save()
    assert [float(state["param_groups"][0]["lr"]) for state in saved] == [1.0] * 4
    assert taken(optimizer, parameter) == pytest.approx(0.5)  # neither twice cut nor left uncut

    path = tmp_path / "optimizer.pt"
    torch.save(optimizer.state_dict(), path)
    optimizer.load_state_dict(torch.load(path))  # in the middle of the cut, which goes on
    assert taken(optimizer, parameter) == pytest.approx(0.5)
    assert float(optimizer.param_groups[0]["lr"]) == 1.0
    fresh, (other,) = sgd(torch.tensor(9.0) if as_tensor else 9.0)
    fresh.load_state_dict(torch.load(path))
    assert taken(fresh, other) == pytest.approx(1.0)


def test_steps_that_mixed_precision_skips_are_not_counted() -> None:
    optimizer, (parameter,) = sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
    cut = CutLearningRate(optimizer, factor=0.5, steps=2)
    cut(alert("watch"), Monitor())
    moves = []
    for gradient in (math.inf, 1.0, math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((parameter * gradient).sum()).backward()
        before = parameter.item()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update(scale)
        moves.append(before - parameter.item())
    assert moves == pytest.approx([0.0, 0.5, 0.0, 0.5, 1.0])


def test_an_optimizer_with_a_closure_may_be_cut_from_inside_its_step() -> None:
    """Where backward runs inside ``step``, so does the monitor: the cut begins with the next."""
    optimizer, (parameter,) = sgd()
    cut = CutLearningRate(optimizer, factor=0.5, steps=2)

    def closure() -> torch.Tensor:
        if parameter.item() == 0.0:
            cut(alert("watch"), Monitor())
        return parameter.sum()

    moves = []
    for _ in range(4):
        before = parameter.item()
        optimizer.step(closure)
        moves.append(before - parameter.item())
    assert moves == pytest.approx([1.0, 0.5, 0.5, 1.0])


def test_the_optimizer_inside_a_framework_s_is_cut() -> None:
    optimizer, (parameter,) = sgd()

    class Prepared:
        def __init__(self) -> None:
            self.optimizer = optimizer

    CutLearningRate(Prepared(), factor=0.5)(alert("watch"), Monitor())
    assert taken(optimizer, parameter) == pytest.approx(0.5)


def test_a_hook_that_fails_is_counted_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer, (parameter,) = sgd()
    cut = CutLearningRate(optimizer)
    cut(alert("watch"), Monitor())
    with torch.no_grad():
        optimizer.param_groups.append({"params": [], "lr": "not a number"})
    optimizer.param_groups[1].update(optimizer.param_groups[0] | optimizer.param_groups[1])
    assert taken(optimizer, parameter) == pytest.approx(0.5)
    taken(optimizer, parameter)
    assert cut.failures == 2
    assert len([r for r in caplog.records if "CutLearningRate failed" in r.getMessage()]) == 1


def test_several_ranks_are_not_cut_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each learns of the alert at a step of its own; the loop calls ``cut`` when all know."""
    optimizer, (parameter,) = sgd()
    cut = CutLearningRate(optimizer, factor=0.5)
    monkeypatch.setattr(actions, "rank_and_world", lambda: (0, 2))
    with pytest.raises(AuditorError, match="all ranks at the same step"):
        cut(alert("danger"), Monitor())
    assert taken(optimizer, parameter) == 1.0
    cut.cut()
    assert taken(optimizer, parameter) == pytest.approx(0.5)


def test_a_monitor_calls_them_inside_its_step(tmp_path: Path) -> None:
    """A real one, by thresholds that call every grade a danger; one of the actions fails."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=16, width=16, n_blocks=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    cut = CutLearningRate(optimizer, steps=100)

    def failing(alert: Alert, monitor: Any) -> None:
        raise RuntimeError("of the user's own making")

    at_once = {"warmup_samples": 0, "warmup_steps": 0, "settle_steps": 0, "low_steps": 0}
    policy = Policy(**at_once, watch_grade=7, danger_grade=7)
    monitor = GradeMonitor(
        model, run=tmp_path / "run", every=1, policy=policy, on_alert=[failing, StopTraining(), cut]
    )
    for _ in range(20):
        loss = next_byte_loss(model, torch.randint(0, 256, (4, 17)))
        optimizer.zero_grad()
        loss.backward()
        monitor.step(loss, optimizer=optimizer)
        optimizer.step()
        monitor.flush()
        if monitor.should_stop:
            break
    assert monitor.should_stop
    assert cut.active_factor == pytest.approx(1 / 3)
    before = model.head.weight.detach().clone()
    optimizer.step()
    moved = (before - model.head.weight.detach()).norm() / model.head.weight.grad.norm()
    assert float(moved) == pytest.approx(1e-3 / 3, rel=1e-3)
    monitor.close()
    assert monitor._recorder.failures == {"action failing": 1}


# -- the webhook -----------------------------------------------------------------------------


class Server:
    """A local server that keeps what was posted; ``answer`` decides each status."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.statuses: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                server.may_answer.wait(30)
                server.bodies.append(json.loads(body))
                status = server.statuses.pop(0) if server.statuses else 200
                self.send_response(status)
                if status in (302, 307):
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/hooks/T0KEN?key=S3CRET"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.may_answer.set()
    one.http.shutdown()
    one.http.server_close()


def test_a_webhook_posts_the_alert_and_that_it_is_over(server: Server) -> None:
    webhook = Webhook(server.url)
    webhook(alert("recovered"), Monitor())  # of something never posted
    webhook(alert("watch"), Monitor())
    webhook(alert("danger", step=7, grade=None, ratio=math.nan, layer=None), Monitor())
    webhook(alert("recovered", step=8, signal="max_logit"), Monitor())  # of another signal
    webhook(alert("recovered", step=9), Monitor())
    webhook(alert("recovered", step=10), Monitor())
    assert webhook.flush(30)
    assert [(body["level"], body["step"]) for body in server.bodies] == [
        ("danger", 7),
        ("recovered", 9),
    ]
    assert server.bodies[0] == {
        "step": 7,
        "level": "danger",
        "grade": None,
        "ratio": None,
        "layer": None,
        "signal": "grade",
        "message": "danger at 7",
    }
    assert webhook.posted == 2


def test_slack_is_given_a_text(server: Server) -> None:
    webhook = Webhook(server.url, format="slack", at="watch")
    webhook(alert("watch", step=3), Monitor())
    assert webhook.flush(30)
    assert server.bodies == [{"text": "auditor: watch at 3"}]


def test_failures_are_counted_and_the_address_is_not_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.statuses = [500, 302, 307, 200]
    webhook = Webhook(server.url, at="watch")
    for step in range(4):
        webhook(alert("watch", step=step), Monitor())
    assert webhook.flush(30)
    assert (webhook.failures, webhook.posted) == (3, 1)
    assert len(server.bodies) == 4  # redirects were not followed
    assert "status 500" in caplog.text
    unreachable = Webhook("http://127.0.0.1:9/hooks/T0KEN", at="watch", timeout_s=2)
    unreachable(alert("watch"), Monitor())
    assert unreachable.flush(30)
    assert unreachable.failures == 1
    for text in (caplog.text, repr(webhook), repr(unreachable)):
        assert "T0KEN" not in text and "S3CRET" not in text
    assert f"http://127.0.0.1:{server.http.server_port}" in repr(webhook)


def test_a_server_that_hangs_holds_up_nobody(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.may_answer.clear()
    webhook = Webhook(server.url, at="watch", timeout_s=20)
    webhook(alert("watch", step=-1), Monitor())
    while webhook._waiting.qsize():  # until the thread has taken it and hangs
        pass
    for step in range(QUEUE_ALERTS + 3):
        webhook(alert("watch", step=step), Monitor())
    assert webhook.dropped == 3
    assert caplog.text.count("are dropped and counted") == 1
    assert not webhook.flush(0.01)
    server.may_answer.set()
    assert webhook.flush(30)
    assert [body["step"] for body in server.bodies] == list(range(-1, QUEUE_ALERTS))


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/S3CRET",
        "ftp://host/S3CRET",
        "S3CRET",
        "https:///S3CRET",
        "https://user:S3CRET@host/",
        "https://host:S3CRET/",
        "https://[S3CRET",
    ],
)
def test_addresses_that_cannot_be_posted_to_are_refused_without_quoting_them(url: str) -> None:
    with pytest.raises(ValueError, match="url") as refused:
        Webhook(url)
    assert "S3CRET" not in str(refused.value)


# -- the register of checkpoints -------------------------------------------------------------


def test_registered_checkpoints_are_read_back_and_a_torn_line_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    append_checkpoint(tmp_path, "ckpt/a.pt", 100, attempt=0, rank=0)
    file = tmp_path / "checkpoints/rank-00000.jsonl"
    append_checkpoint(tmp_path, Path("/data/b\udce9.pt"), 200, attempt=0, rank=0)
    with file.open("ab") as stream:
        stream.write(b'{"attempt": 0, "step": 300, "pa')  # killed while writing
    found, n_dropped = registered(tmp_path)
    assert ([one.step for one in found], n_dropped) == ([100, 200], 1)
    append_checkpoint(tmp_path, "s3://bucket/c", 400, attempt=1, rank=0)
    found, n_dropped = registered(tmp_path)
    assert [(one.path, one.step, one.attempt) for one in found] == [
        (str(tmp_path / "ckpt/a.pt"), 100, 0),
        ("/data/b\udce9.pt", 200, 0),
        ("s3://bucket/c", 400, 1),
    ]
    assert n_dropped == 1


def test_a_run_without_a_register_has_no_checkpoints(tmp_path: Path) -> None:
    assert registered(tmp_path) == ([], 0)
