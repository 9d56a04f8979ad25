"""What was recorded, as plain values: `Record` (layers × records), `Run`, `Incident`.

Numpy arrays, strings and dicts only: no tensor, no module, no device. So a record can be built by
hand, pickled, saved, drawn and judged, long after the model is gone.

    values    array types, equality, labels; how a source of records is read
    frames    as a pandas DataFrame
    npz       in an .npz file
    logs      what is new, sent to TensorBoard, a tracker, a file that grows
    record    Record, with the methods above
    joining   two runs as one: what `run + later` is made of
    run       Run, Incident; as_run of any source
"""

from hookkit.records.record import (
    KINDS,
    PARAM_STATISTICS,
    STATISTICS,
    UNIT_STATISTICS,
    Exports,
    Record,
    Tables,
)
from hookkit.records.run import Incident, Run, Views, as_record, as_run, by_module, in_order
from hookkit.records.values import Floats, Ints, label

__all__ = [
    "KINDS",
    "PARAM_STATISTICS",
    "STATISTICS",
    "UNIT_STATISTICS",
    "Exports",
    "Floats",
    "Incident",
    "Ints",
    "Record",
    "Run",
    "Tables",
    "Views",
    "as_record",
    "as_run",
    "by_module",
    "in_order",
    "label",
]
