"""Unsupported programs are refused on every rank, with the call and the fix, and nothing hangs."""

import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan, RandomOperatorError
from vescale.pipe._run import draws
from vescale_testing import ranks


class Body(nn.Module):
    """Two blocks; subclasses define the code between and after them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def between(self, h, x):
        del x
        return h

    def after(self, h):
        return h.square().mean()

    def forward(self, x):
        return self.after(self.second(self.between(self.first(x), x)))


def make_engine(model, pipeline_mesh, num_microbatches=2, **kwargs):
    return PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", num_microbatches, ["second"]), **kwargs)


def check_refused(model, pipeline_mesh, error, match, batch=None):
    """Both ranks raise the same error, and the engine can still run another program."""
    engine = make_engine(model, pipeline_mesh)
    with pytest.raises(error, match=match):
        engine(torch.randn(4, 4) if batch is None else batch)


# --- values on the wrong stage ---


@ranks(2)
def test_control_flow_on_values(pipeline_mesh):
    class Model(Body):
        def between(self, h, x):
            del x
            return h if h.sum() > 0 else -h

    check_refused(Model(), pipeline_mesh, PipelineError, "got `__bool__`, which reads the elements of a value")


@pytest.mark.parametrize("read", ["item", "tolist", "__float__"])
@ranks(2)
def test_reading_a_value(read, pipeline_mesh):
    class Model(Body):
        def after(self, h):
            getattr(h.mean(), read)()
            return h.mean()

    match = "expected tensor operators outside of stage modules, got .*, which reads the elements of a value of stage 1"
    check_refused(Model(), pipeline_mesh, PipelineError, match)


@ranks(2)
def test_a_value_of_a_later_stage(pipeline_mesh):
    class Model(Body):
        def after(self, h):
            return self.first(h).mean()

    match = (
        r"`first` on stage 0: expected arguments of this or earlier stages, got output 0 of `second` \(stage 1\); "
        r"put `first` on stage 1 or later"
    )
    check_refused(Model(), pipeline_mesh, PipelineError, match)


@ranks(2)
def test_a_parameter_of_another_stage(pipeline_mesh):
    class Model(Body):
        def after(self, h):
            return (h @ self.first.weight).mean()

    match = "`matmul`: expected values of this stage, got `first.weight`, which is on pipeline stage 0 only"
    check_refused(Model(), pipeline_mesh, PipelineError, match)


@ranks(2)
def test_an_unused_last_stage(pipeline_mesh):
    class Model(Body):
        def forward(self, x):
            self.second(x)
            return self.first(x).mean()

    match = r"expected a result of the last stage 1, got output 0 of `mean` \(stage 0\)"
    check_refused(Model(), pipeline_mesh, PipelineError, match)


@ranks(2)
def test_a_loss_of_no_stage(pipeline_mesh):
    class Model(Body):
        def forward(self, x):
            self.second(self.first(x))
            return x.mean()

    check_refused(Model(), pipeline_mesh, PipelineError, "expected a loss that depends on the output of a stage")


# --- tensors that leave a module other than by its output ---


class Keeping(nn.Module):
    """Its own forward keeps a tensor, or what the tensor is like."""

    def __init__(self, kept, of=lambda h: h):
        super().__init__()
        self.linear, self.tanh = nn.Linear(4, 4), nn.Tanh()
        self.kept, self.of = kept, of

    def forward(self, x):
        self.kept.append(self.of(h := self.linear(x)))
        return self.tanh(h)


@ranks(2)
def test_a_tensor_that_a_forward_keeps(pipeline_mesh):
    """A list collects the internal tensors of this stage alone: a loss over them would be silently wrong."""
    kept = []

    class Model(Body):
        def __init__(self):
            super().__init__()
            self.first, self.second = Keeping(kept), Keeping(kept)

        def after(self, h):
            return h.mean() + torch.stack(kept).mean()

    match = "`stack`: expected outputs of stage modules, got an internal tensor of `.*or let a forward hook store an"
    check_refused(Model(), pipeline_mesh, PipelineError, match)


@ranks(2)
def test_code_outside_that_fails_where_nothing_is_kept(pipeline_mesh):
    """The user's own error, with a note on the first rank that raises it; others get it as text."""
    kept = []

    class Model(Body):
        def __init__(self):
            super().__init__()
            self.first = Keeping(kept, lambda h: h.shape)

        def after(self, h):
            return h.mean() * kept[0].numel()

    engine = PipelineEngine(Model(), pipeline_mesh(), PipelinePlan("1f1b", 2, split=["second"]))
    with pytest.raises((IndexError, PipelineError)) as caught:
        engine(torch.ones(2, 4))
    if torch.distributed.get_rank() == 1:
        assert caught.type is IndexError
        assert "what attributes keep inside of modules" in caught.value.__notes__[0]
    else:
        assert "IndexError" in str(caught.value)


@ranks(2)
def test_a_value_that_a_hook_keeps_from_one_forward_to_the_next(pipeline_mesh):
    """In one process autograd refuses it."""
    kept = []

    class Model(Body):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.first[0].register_forward_hook(lambda *call: kept.append(call[-1]))

        def after(self, h):
            return h.mean() + torch.stack(kept).mean()

    stale = "`stack`: expected values of this forward, got a tensor that a hook stores .* of an earlier one, .*clear it"
    longer = "this micro-batch diverges from the recorded program"  # where tensors are kept, without a rehearsal
    check_refused(Model(), pipeline_mesh, PipelineError, f"{stale}|{longer}")


@ranks(2)
def test_a_value_hidden_in_an_object(pipeline_mesh):
    class Box:
        def __init__(self, content):
            self.content = content

    class Opens(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, box):
            return self.linear(box.content)

    class Model(Body):
        def __init__(self):
            super().__init__()
            self.second = Opens()

        def between(self, h, x):
            del x
            return Box(h)

    match = r"expected values of this stage, got output 0 of `first` \(stage 0\), float32\[2, 4\], inside an opaque"
    check_refused(Model(), pipeline_mesh, PipelineError, match)


@ranks(2)
def test_an_output_that_cannot_be_described(pipeline_mesh):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x), object()

    class Model(Body):
        def __init__(self):
            super().__init__()
            self.first = Returns()

        def between(self, h, x):
            del x
            return h[0]

    check_refused(Model(), pipeline_mesh, PipelineError, "output of `first`: expected tensors .*, got object")


# --- in-place writes ---


@ranks(2)
def test_a_write_after_the_send(pipeline_mesh):
    class Model(Body):
        def forward(self, x):
            h = self.first(x)
            out = self.second(h)
            h.detach().add_(1)
            return (out + h).mean()

    match = r"output 0 of `first` \(stage 0\): expected no write after the send"
    check_refused(Model(), pipeline_mesh, PipelineError, match)


@ranks(2)
def test_a_view_of_what_moved_to_another_stage(pipeline_mesh):
    class Model(Body):
        def after(self, h):
            total = torch.zeros(3)
            view = total.view(3, 1)
            total += h.mean()
            return view.mean() + total.mean()

    match = "`mean`: expected current values, got a stale view of a tensor that `add_` wrote in place on another stage"
    check_refused(Model(), pipeline_mesh, PipelineError, match)


# --- randomness ---


class WithDropout(Body):
    def __init__(self, p):
        super().__init__()
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Dropout(p))


class WithNoise(Body):
    def between(self, h, x):
        return h + torch.randn_like(x)


@ranks(2)
def test_draws_of_parts_of_a_batch(pipeline_mesh, monkeypatch):
    """Without a package that knows which rows of the batch's draws are a micro-batch's."""
    monkeypatch.setattr(draws, "_package", lambda: None)
    match = (
        "expected no random operators in micro-batches that are parts of one batch, got one in `second`: they would "
        "not draw what the batch draws; install vescale-dtensor, .* pass per_microbatch=True"
    )
    check_refused(WithDropout(0.5), pipeline_mesh, RandomOperatorError, match)
    assert issubclass(RandomOperatorError, NotImplementedError)


@ranks(2)
def test_noise_outside_of_modules(pipeline_mesh, monkeypatch):
    monkeypatch.setattr(draws, "_package", lambda: None)
    check_refused(WithNoise(), pipeline_mesh, RandomOperatorError, "got one in .*: they would not draw")


@ranks(2)
def test_dropout_that_is_off_is_accepted(pipeline_mesh, monkeypatch):
    monkeypatch.setattr(draws, "_package", lambda: None)
    x = torch.randn(4, 4)
    for model in (WithDropout(0.0), WithDropout(0.5).eval()):
        assert make_engine(model, pipeline_mesh)(x).requires_grad


@ranks(2)
def test_a_generator_of_the_program(pipeline_mesh):
    class Model(Body):
        def between(self, h, x):
            return h + torch.rand(x.shape, generator=torch.Generator())

    match = "got aten.rand.* in code outside of stage modules with a generator of its own"
    check_refused(Model(), pipeline_mesh, RandomOperatorError, match)


@ranks(2)
def test_a_seed_in_a_module(pipeline_mesh):
    class Seeds(nn.Linear):
        def forward(self, x):
            torch.manual_seed(3)
            return super().forward(x)

    model = Body()
    model.second = Seeds(4, 4)
    match = "expected random operators that always draw equally many numbers, got others in `second`: a seed"
    check_refused(model, pipeline_mesh, RandomOperatorError, match)


# --- inputs ---


@pytest.mark.parametrize(
    "batch, match",
    [
        (torch.ones(1, 4), r"input #0: expected a row for each of num_microbatches=2, got 1 \(shape \[1, 4\]\)"),
        (torch.ones(0, 4), "input #0: .* num_microbatches=2, got 0"),
        (torch.ones(4, 4, requires_grad=True), "input #0: .*got requires_grad=True; pass #0.detach"),
        (
            {"x": torch.ones(4, 4), "y": [torch.ones(2, 4)]},
            r"#0\[1\]: expected 4 rows \(dim 0\), as in #0\[0\], got 2",
        ),
    ],
)
@ranks(2)
def test_inputs_that_cannot_be_split(batch, match, pipeline_mesh):
    check_refused(Body(), pipeline_mesh, ValueError, match, batch)


@ranks(2)
def test_ranks_with_different_shapes(pipeline_mesh):
    engine = make_engine(Body(), pipeline_mesh)
    rows = 4 + 4 * engine.stage
    match = r"same inputs on every stage, got different ones; .*:\n  stage 0: #0=float32\[2, 4\].*\n  stage 1"
    with pytest.raises(PipelineError, match=match):
        engine(torch.ones(rows, 4))


@ranks(2)
def test_ranks_with_different_elements(pipeline_mesh):
    engine = make_engine(Body(), pipeline_mesh)
    with pytest.raises(PipelineError, match="same inputs on every stage, got the same shapes with different elements"):
        engine(torch.full((4, 4), float(engine.stage)))


@ranks(2)
def test_an_output_without_a_loss(pipeline_mesh):
    class Model(Body):
        def after(self, h):
            return h

    match = r"expected a scalar loss: .* got a tensor of shape \[2, 4\]; pass labels to the model, or .*loss_fn"
    check_refused(Model(), pipeline_mesh, TypeError, match)


@ranks(4)
def test_an_axis_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with pytest.raises(ValueError, match=r"expected a pipeline mesh of one axis, got 2 axes .*; pass mesh\['pp'\]"):
        PipelineEngine(Body(), mesh, PipelinePlan())


# --- failures ---


@ranks(2)
def test_an_error_in_one_stage_is_raised_on_all(pipeline_mesh):
    class Model(Body):
        def __init__(self):
            super().__init__()
            self.second = nn.Linear(5, 4)

    engine = make_engine(Model(), pipeline_mesh)
    error = RuntimeError if engine.stage == 1 else PipelineError
    match = "shapes cannot be multiplied"
    match = match if engine.stage == 1 else f"stage 1 failed in the first micro-batch(.|\n)*{match}"
    with pytest.raises(error, match=match):
        engine(torch.ones(4, 4))
    with pytest.raises(error, match=match):  # and again: nothing is left half done
        engine(torch.ones(4, 4))


@ranks(2)
def test_stages_that_run_different_programs(pipeline_mesh):
    class Model(Body):
        extra = False

        def between(self, h, x):
            del x
            return h * 2 if self.extra else h

    model = Model()
    engine = make_engine(model, pipeline_mesh)
    model.extra = engine.stage == 0
    match = r"expected the same program on every stage, got stage 0 after call 1 `mul`.*stage 1 before .*`second`"
    with pytest.raises(PipelineError, match=match):
        engine(torch.ones(4, 4))


@ranks(2)
def test_a_program_that_changes_later(pipeline_mesh):
    class Model(Body):
        calls = 0

        def between(self, h, x):
            del x
            self.calls += 1
            return h * 2 if self.calls > 1 else h

    engine = make_engine(Model(), pipeline_mesh)
    match = r"diverges from the recorded program: expected call 1 `second` .*, got call 1 `mul`"
    with pytest.raises(PipelineError, match=match):
        engine(torch.ones(4, 4))


@ranks(2, timeout=40)
def test_after_a_late_failure_the_engine_refuses_steps(pipeline_mesh):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise OSError("disk full")
            return self.linear(x)

    class Model(Body):
        def __init__(self):
            super().__init__()
            self.first = Fails()

    engine = make_engine(Model(), pipeline_mesh, per_microbatch=True)
    begin = time.monotonic()
    if engine.stage == 0:
        with pytest.raises(OSError, match="disk full"):
            engine(torch.ones(4, 4))
    else:
        with pytest.raises(RuntimeError, match=r"rank 0: OSError in 0F1 in step 1\n(.|\n)*disk full"):
            engine(torch.ones(4, 4))
    assert time.monotonic() - begin < 5
    with pytest.raises(PipelineError, match=r"expected an engine without failed steps, .*restart from a checkpoint"):
        engine(torch.ones(4, 4))


@ranks(2)
def test_a_shape_that_varies_with_the_data(pipeline_mesh):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x[x[:, 0] > 0])

    class Model(Body):
        def __init__(self):
            super().__init__()
            self.first = Keeps()

    engine = make_engine(Model(), pipeline_mesh, per_microbatch=True)
    x = torch.ones(4, 4)
    x[3] = -1
    match = (
        r"output 0 of `first` \(stage 0\): expected float32\[2, 4\], .*, got float32\[1, 4\]"
        if engine.stage == 0
        else "rank 0: PipelineError in 0F1 in step 1\n"
    )
    with pytest.raises(RuntimeError, match=match):
        engine(x)


@ranks(2)
def test_calling_the_model_directly(pipeline_mesh):
    model = Body()
    engine = make_engine(model, pipeline_mesh)
    absent = "first" if engine.stage == 1 else "second"
    match = f"got a direct call of `{absent}`, a module of pipeline stage .*; run the model through its engine"
    with pytest.raises(PipelineError, match=match):
        model(torch.ones(4, 4))
