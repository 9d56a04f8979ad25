"""What was recorded, as plain values: `Record` (layers × records), `Run`, `Incident`.

Numpy arrays, strings and dicts only: no tensor, no module, no device. So a record can be built by
hand, pickled, saved, compared, drawn and judged, long after the model is gone.

    values    array types, equality, labels; `records_of` any source of records
    frames    to_df, to_csv, compare
    files     save, and the fields in a saved file
    loggers   log_to: TensorBoard
    record    Record, with the methods above
    joining   Two records as one: what `run + later` is made of
    run       Run, Incident; as_run, as_record of any source; load; by_module, in_order
"""

from hookkit.records.files import save
from hookkit.records.frames import COLUMNS, compare, to_csv, to_df
from hookkit.records.loggers import log_to
from hookkit.records.record import (
    KINDS,
    PARAM_STATISTICS,
    STATISTICS,
    UNIT_STATISTICS,
    Exports,
    Record,
    Tables,
)
from hookkit.records.run import Incident, Run, Views, as_record, as_run, by_module, in_order, load
from hookkit.records.values import Floats, Ints, label, records_of

__all__ = [
    "COLUMNS",
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
    "compare",
    "in_order",
    "label",
    "load",
    "log_to",
    "records_of",
    "save",
    "to_csv",
    "to_df",
]
