"""What was recorded, as plain values: `Record` (layers × records), `Run`, `Incident`.

Numpy arrays, strings and dicts only: no tensor, no module, no device. So a record can be built by
hand, pickled, saved, compared, drawn and judged, long after the model is gone.

    values    equality, array types, the ways out: to_df, save, …; and diagnose, plot, report
    record    Record
    run       Incident, Run; as_run, as_record: of whatever holds one; by_module, in_order
    frames    to_df, to_csv, compare; records_of: the records in whatever holds some
    files     save; load, load_run
    loggers   log_to: TensorBoard
"""

from hookkit.records.files import load, load_run, save
from hookkit.records.frames import COLUMNS, compare, records_of, to_csv, to_df
from hookkit.records.loggers import log_to
from hookkit.records.record import (
    KINDS,
    PARAM_STATISTICS,
    STATISTICS,
    UNIT_STATISTICS,
    Record,
    label,
)
from hookkit.records.run import Incident, Run, as_record, as_run, by_module, in_order
from hookkit.records.values import Exports, Floats, Ints, Tables, Views

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
    "load_run",
    "log_to",
    "records_of",
    "save",
    "to_csv",
    "to_df",
]
