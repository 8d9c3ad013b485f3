"""Data sets that try to run code, to reach the network or to have others read; see `malicious_files`."""

import io
import json
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
from malicious_parts import CODE, SHELL, Case, load_data, load_only, payloads

from viva.recipes.data import load_jsonl


def data_sets(outside):
    payload = dict(payloads())
    rows = [
        {"prompt": {"py/object": "os.system", "py/reduce": [{"py/function": "os.system"}, SHELL]}},
        {"prompt": "x", "__reduce__": CODE, "__class__": "os.system"},
        {"prompt": "!!python/object/apply:os.system ['x']"},
        {"prompt": "=cmd|'/c calc'!A0"},
    ]
    for index, row in enumerate(rows):

        def lines(folder, row=row):
            (folder / "data.jsonl").write_text(json.dumps(row) + "\n")

        yield Case(f"data: JSON lines {index}", lines, load_only)
        yield Case(
            f"data: JSON lines {index}, read by viva", lines, lambda folder: load_jsonl(folder / "data.jsonl")
        )
    for kind, content in payload.items():
        for name in ("data.jsonl", "data.csv", "data.parquet"):

            def pickled(folder, content=content, name=name):
                (folder / name).write_bytes(content)

            yield Case(f"data: {kind} as {name}", pickled, load_only)
    yield Case(
        "data: a table of code",
        lambda folder: (folder / "d.csv").write_text(f'prompt,x\n"{CODE}",=1+1\n"@eval(1)",2\n'),
        load_only,
    )
    schema = pa.schema(
        [
            pa.field("prompt", pa.string()),
            pa.field(
                "x",
                pa.binary(),
                metadata={
                    b"ARROW:extension:name": b"arrow.py_extension_type",
                    b"ARROW:extension:metadata": payload["system"],
                },
            ),
        ]
    )
    table = pa.table({"prompt": ["a"], "x": [b"b"]}, schema=schema)

    def features(kind):
        info = {"info": {"features": {"prompt": {"_type": kind, "dtype": "string", "id": CODE}}}}
        return table.drop_columns(["x"]).replace_schema_metadata({"huggingface": json.dumps(info)})

    yield Case(
        "data: an extension type that is a pickle",
        lambda f: pq.write_table(table, f / "d.parquet"),
        load_only,
    )
    for kind in ("os.system", "Value", "../evil"):
        yield Case(
            f"data: features of type {kind}",
            lambda folder, kind=kind: pq.write_table(features(kind), folder / "d.parquet"),
            load_only,
        )
    yield from _data_folders(payload, outside, table)


def _data_folders(payload, outside, table):
    good = '{"prompt": "a"}\n'

    def script(folder):
        (folder / f"{folder.name}.py").write_text(CODE)
        (folder / "evil.py").write_text(CODE)
        (folder / "train.jsonl").write_text(good)

    yield Case("data: a folder with a script", script, load_data)

    def only_script(folder):
        (folder / f"{folder.name}.py").write_text(CODE)

    yield Case("data: a folder that is a script", only_script, load_data)
    for kind in ("pkl", "pt", "npy", "bin"):

        def pickles(folder, kind=kind):
            (folder / f"train.{kind}").write_bytes(payload["system"])
            (folder / "README.md").write_text(
                f"---\nconfigs:\n- config_name: default\n  data_files: train.{kind}\n---\n"
            )

        yield Case(f"data: a folder of .{kind}", pickles, load_data)

    def yaml(folder):
        (folder / "train.jsonl").write_text(good)
        (folder / "README.md").write_text(f"---\nx: !!python/object/apply:os.system ['{SHELL}']\n---\n")

    yield Case("data: a description with objects", yaml, load_data)

    def saved(folder):
        state = {
            "_data_files": [{"filename": "../../outside/secret.json"}],
            "_fingerprint": "x",
            "_format_type": CODE,
        }
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text(
            json.dumps({"features": {"prompt": {"_type": "os.system"}}})
        )

    yield Case("data: saved, with tables elsewhere", saved, load_data)

    def arrow(folder):
        with (
            pa.OSFile(str(folder / "data.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)

    yield Case("data: an Arrow file with a pickled type", arrow, load_data)
    yield from _archives(payload, outside, good)


def _archives(payload, outside, good):
    for kind in ("../../escaped.jsonl", "/tmp/viva_escaped.jsonl", "link"):

        def tar(folder, kind=kind):
            with tarfile.open(folder / "train.tar", "w") as archive:
                member = tarfile.TarInfo(kind)
                if kind == "link":
                    member.type, member.linkname = tarfile.SYMTYPE, str(outside)
                    archive.addfile(member)
                    member = tarfile.TarInfo("link/written.json")
                member.size = len(good)
                archive.addfile(member, io.BytesIO(good.encode()))
                member = tarfile.TarInfo("0001.pyd")
                member.size = len(payload["system"])
                archive.addfile(member, io.BytesIO(payload["system"]))

        yield Case(f"data: an archive with {kind}", tar, load_data)

    def zipped(folder):
        with zipfile.ZipFile(folder / "train.zip", "w") as archive:
            archive.writestr("../../../escaped.jsonl", good)
            archive.writestr("train.jsonl", good)

    yield Case("data: a zip that climbs", zipped, load_data)
