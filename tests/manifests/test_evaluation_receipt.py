"""The published schema of evaluation receipts."""

from __future__ import annotations

import json
from pathlib import Path

from mla_convert.manifests import models
from mla_convert.manifests.evaluation.receipt import evaluation_schema_text

SCHEMA_FILE = Path(models.__file__).parent / "schemas" / "evaluation-receipt-v1.json"


def test_the_committed_schema_is_up_to_date() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == evaluation_schema_text(), (
        'the records changed: write a new schema version, or refresh this one with `python -c "from mla_convert.'
        "manifests.evaluation.receipt import evaluation_schema_text; print(evaluation_schema_text(), end='')\""
        f" > {SCHEMA_FILE}`"
    )


def test_the_schema_forbids_unknown_fields_everywhere() -> None:
    schema = json.loads(evaluation_schema_text())
    records = [schema, *(record for record in schema["$defs"].values() if "properties" in record)]
    assert len(records) > 20
    assert all(record["additionalProperties"] is False for record in records)
