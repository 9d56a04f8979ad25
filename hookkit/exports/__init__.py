"""Records for other tools: DataFrame, CSV, `.npz` and back, TensorBoard, and two runs side by side.

tables         to_df, to_csv, compare; records_of: the records in whatever holds some
files          save; load, load_run
tensorboard    log_to
"""

from hookkit.exports.files import load, load_run, save
from hookkit.exports.tables import COLUMNS, compare, records_of, to_csv, to_df
from hookkit.exports.tensorboard import log_to

__all__ = [
    "COLUMNS",
    "compare",
    "load",
    "load_run",
    "log_to",
    "records_of",
    "save",
    "to_csv",
    "to_df",
]
