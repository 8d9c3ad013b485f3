"""tinker-cookbook's Inspect evaluators on the local engine. They need inspect-ai, none of Viva's own dependencies."""

import pytest
from random_models import make_model

from viva.engine import LocalServiceClient

pytest.importorskip("inspect_ai", reason="needs inspect-ai (pip install 'tinker-cookbook[inspect]')")


@pytest.mark.filterwarnings("ignore")  # of some fifty packages that are not ours
async def test_an_inspect_task_is_sampled_from_the_local_engine(tmp_path):
    from inspect_ai import Task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.log import list_eval_logs, read_eval_log
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate
    from tinker_cookbook.eval.inspect_evaluators import InspectEvaluatorBuilder

    model = make_model(tmp_path / "model", "qwen3")
    client = LocalServiceClient().create_sampling_client(base_model=str(model))
    samples = [Sample(input=f"{n} + 1?", target=str(n + 1)) for n in range(3)]
    task = Task(dataset=MemoryDataset(name="sums", samples=samples), solver=generate(), scorer=includes())
    evaluate = InspectEvaluatorBuilder(
        tasks=task,
        renderer_name="qwen3_instruct",
        model_name=str(model),
        max_tokens=6,
        seed=0,
        log_dir=str(tmp_path / "logs"),
    )
    metrics = await evaluate()(client)
    assert 0.0 <= metrics["sums/accuracy"] <= 1.0
    (log,) = (read_eval_log(each) for each in list_eval_logs(str(tmp_path / "logs")))
    assert (log.status, len(log.samples)) == ("success", 3)
    assert all(0 < sample.output.usage.output_tokens <= 6 for sample in log.samples)
