import copy
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import with_kernels
from torch import nn

from viva.engine.linear import (
    JointPart,
    PackedLinear,
    TiledLinear,
    can_pack,
    can_tile,
    join_linears,
    pack_linears,
    product,
)
from viva.engine.model import load_base_model

pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="this torch has no packed product")


Product = type[TiledLinear] | type[PackedLinear]
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no packed product in bfloat16 here"
    ),
)
TILED = pytest.param(TiledLinear, marks=with_kernels)


def has_kernel(dtype: torch.dtype) -> bool:
    return can_tile(torch.zeros(2, 2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [TILED, PackedLinear])
@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 150),
    biased=st.booleans(),
)
def test_a_packed_layer_computes_what_the_layer_computed(
    kind: Product, dtype: torch.dtype, shape: list[int], inputs: int, outputs: int, biased: bool
) -> None:
    inputs += inputs % 2 * (dtype == torch.bfloat16)
    generator = torch.Generator().manual_seed(inputs * outputs)
    make = partial(torch.randn, generator=generator, dtype=dtype)
    weight, bias = make(outputs, inputs), make(outputs) if biased else None
    values, others = make(*shape, inputs), make(*shape, outputs)
    if not (has_kernel(dtype) if kind is TiledLinear else can_pack(weight)):
        pytest.skip("no such product of these numbers here")
    expected = values.double() @ weight.double().T + (0 if bias is None else bias.double())
    before = others.clone()
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.04, "rtol": 0.02}
    with torch.inference_mode():
        layer = kind(weight, bias)
        torch.testing.assert_close(layer(values).double(), expected, **close)
        torch.testing.assert_close(
            layer.added_to(others, values).double(), others.double() + expected, **close
        )
    assert torch.equal(others, before)


@with_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [191, 192, 193, 400, 1000])
@torch.inference_mode()
def test_a_row_of_many_is_to_the_bit_what_it_is_alone(num_rows: int, dtype: torch.dtype) -> None:
    if not has_kernel(dtype):
        pytest.skip("no kernel of these numbers here")
    torch.manual_seed(num_rows)
    make = partial(torch.randn, dtype=dtype)
    values, layer = make(num_rows, 34), TiledLinear(make(70, 34), make(70))
    whole = layer(values)
    for row in (0, 5, 100, num_rows - 1):
        assert torch.equal(whole[row], layer(values[row]))
    transposed = values.T.contiguous().T
    assert torch.equal(whole, layer(transposed))


@with_kernels
@pytest.mark.parametrize("has_pairs", [False, True])
def test_the_kernel_multiplies_in_float32_and_where_it_can_in_bfloat16(
    has_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viva.engine.kernels.products.HAS_PAIRS", has_pairs)
    kinds: dict[torch.dtype, type] = {torch.float32: TiledLinear}
    if has_pairs or can_pack(torch.zeros(4, 4, dtype=torch.bfloat16)):  # else bfloat16 stays with torch
        kinds[torch.bfloat16] = TiledLinear if has_pairs else PackedLinear
    for dtype, kind in kinds.items():
        assert type(join_linears([nn.Linear(4, 4, dtype=dtype)])) is kind
    assert can_tile(torch.zeros(3, 3))
    assert not can_tile(torch.zeros(3, 3, dtype=torch.bfloat16))


@with_kernels
@settings(deadline=None)
@given(
    rows=st.integers(1, 60),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 150),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_weights_that_are_bfloat16_are_kept_so_and_multiply_float32_to_the_bit(
    rows: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    make = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    layer = nn.Linear(inputs, outputs, bias=biased)
    layer.load_state_dict({name: make(value.shape) for name, value in layer.state_dict().items()})
    values, others = make(rows, inputs), make(rows, outputs)
    with torch.inference_mode():
        exact = layer.weight.detach().clone()
        layer.weight.copy_(layer.weight.bfloat16().float())
        wide, narrow = TiledLinear(layer.weight.clone(), layer.bias), join_linears([layer])
        assert stored_in(wide) == torch.float32
        assert stored_in(narrow) == torch.bfloat16
        assert torch.equal(narrow(values), wide(values))
        assert torch.equal(narrow.added_to(others, values), wide.added_to(others, values))
        # rounded where that is asked for, and never else
        layer.weight.copy_(exact)
        assert torch.equal(join_linears([layer], torch.bfloat16)(values), wide(values))
        layer.weight[-1, -1] = 1 + 2**-9
        assert stored_in(join_linears([layer])) == torch.float32


def stored_in(product: object) -> torch.dtype:
    assert isinstance(product, TiledLinear)
    return product._tiles.dtype


LAYOUTS: dict[str, Callable[[Callable[[int, int], torch.Tensor], int, int], torch.Tensor]] = {
    "plain": lambda make, rows, columns: make(rows, columns),
    "transposed": lambda make, rows, columns: make(columns, rows).T,
    "part of a wider one": lambda make, rows, columns: make(rows, columns + 5)[:, 3 : columns + 3],
    "every second number": lambda make, rows, columns: make(2 * rows, 2 * columns)[::2, ::2],
    "one row for all": lambda make, rows, columns: make(1, columns).expand(rows, columns),
    "one number for all": lambda make, rows, columns: make(1, 1).expand(rows, columns),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@settings(deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 33),
    st.integers(1, 33),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
)
def test_a_product_is_right_in_any_layout(
    dtype: torch.dtype, num_rows: int, inputs: int, outputs: int, left: str, right: str, biased: bool
) -> None:
    torch.manual_seed(num_rows + 41 * inputs + 1500 * outputs)
    make = partial(torch.randn, dtype=dtype)
    rows, weight = LAYOUTS[left](make, num_rows, inputs), LAYOUTS[right](make, outputs, inputs)
    bias = torch.randn(outputs, dtype=dtype) if biased else None
    expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = product(rows, weight, bias)
    assert found.dtype == dtype
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_prompts_of_all_lengths_need_few_kernels() -> None:
    sizes: set[int] = set()
    layer = PackedLinear(torch.eye(4), None)
    layer._product = lambda rows, *_: sizes.add(rows.numel() // 4) or rows
    values = torch.arange(4 * 4096.0).view(4096, 4)
    with torch.inference_mode():
        for length in range(1, 4097):
            assert torch.equal(layer(values[:length]), values[:length])
    assert len(sizes) < 64 + 90, "all up to 64, then one in eight or fewer"


def test_packing_a_copy_leaves_the_base_model_alone(model_dir: Callable[[str], str]) -> None:
    base = load_base_model(model_dir("qwen2"), torch.device("cpu"), torch.float32)
    linears = [name for name, layer in base.module.named_modules() if isinstance(layer, nn.Linear)]
    packed = pack_linears(base.decode_copy())
    assert [
        name
        for name, layer in packed.named_modules()
        if isinstance(layer, TiledLinear | PackedLinear | JointPart)
    ] == linears
    assert all(isinstance(base.module.get_submodule(name), nn.Linear) for name in linears)
    assert not any(isinstance(layer, nn.Linear) for layer in packed.modules())
    for name in ("model.embed_tokens", "model.norm"):
        assert packed.get_submodule(name).weight is base.module.get_submodule(name).weight


class _Attention(nn.Module):
    """Three layers with the names of an attention's, that need not read the same."""

    def __init__(self, *, biased: tuple[bool, bool, bool] = (True, True, True)) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(6, size, bias=bias) for size, bias in zip((8, 4, 3), biased, strict=True)
        )

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return [layer(values) for layer, values in zip(layers, inputs, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("biased", [(True, True, True), (False, False, False), (True, False, True)])
@torch.inference_mode()
def test_layers_of_one_input_compute_what_they_would_alone(
    dtype: torch.dtype, biased: tuple[bool, bool, bool]
) -> None:
    torch.manual_seed(0)
    module = _Attention(biased=biased).to(dtype)
    alone = [join_linears([cast(nn.Linear, layer)]) for layer in module.children()]
    together = pack_linears(copy.deepcopy(module))
    assert isinstance(together.q_proj, JointPart) == (len(set(biased)) == 1)
    for rows in (1, 5, 40):
        x, y = torch.randn(2, rows, 6).to(dtype)
        for inputs in ((x, x, x), (x, y, x), (y, y, x), (x, x, x)):  # also where inputs differ after all
            for output, layer, values in zip(together(*inputs), alone, inputs, strict=True):
                assert torch.equal(output, layer(values))


@pytest.mark.parametrize("weight", [torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, device="meta")])
def test_other_weights_stay_as_they_are(weight: torch.Tensor) -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(weight)
    assert pack_linears(nn.Sequential(layer))[0] is layer
