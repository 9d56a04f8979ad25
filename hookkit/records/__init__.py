"""What was recorded, as plain values: `Record` (layers × steps), `Run`, `Incident`.

Numpy arrays, strings and dicts only: no tensor, no module, no device. So a record can be built by
hand, pickled, saved, drawn and judged, long after the model is gone.

    plain     read-only arrays, equality, labels
    logs      what is new, sent to TensorBoard, a tracker, a file that grows
    run       Record, Run, Incident, and their methods; as_run of any source
    npz       a run in an .npz file
    joining   two runs as one: `run + later`
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
