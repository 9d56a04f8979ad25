"""Trainings of the kinds that people run, healthy and failing, written without knowing the rules.

    trials.py       Trial, `healthy`, `failing`, and what a training function gets

Each of the other files holds the trainings of one subject; `fresh_…`, `last_…`, `fifth_…` and
`sixth_…` are the parts that were written when the rules were done. `benchmarks/verdicts.py` runs
them.
"""
