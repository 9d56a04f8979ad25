"""Everything recorded, as plain values: `Record` (layers × steps), `Run`, `Incident`.

They hold numpy arrays, strings and dicts only: no tensor, no module, no device. So a record can be
built by hand, pickled, saved, drawn and diagnosed after the model is gone.

    plain     read-only arrays, equality, labels
    logs      sends new values to TensorBoard, a tracker, or a file
    run       Record, Run, Incident, and their methods; as_run of any source
    npz       writes and reads a run in an .npz file
    joining   `run + later`: two runs as one
"""

from hookkit.records.plain import Floats, Ints, label
from hookkit.records.run import (
    KINDS,
    PARAM_STATISTICS,
    STATISTICS,
    UNIT_STATISTICS,
    Incident,
    Record,
    Reportable,
    Run,
    as_record,
    as_run,
    grad_norms,
)

__all__ = [
    "KINDS",
    "PARAM_STATISTICS",
    "STATISTICS",
    "UNIT_STATISTICS",
    "Floats",
    "Incident",
    "Ints",
    "Record",
    "Reportable",
    "Run",
    "as_record",
    "as_run",
    "grad_norms",
    "label",
]
