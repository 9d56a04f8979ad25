"""Trainings of the kinds that people run, healthy and failing, written without knowing the rules.

    trials.py   Trial, `healthy`, `failing`, and what a training function gets
    data.py     data of several

Each of the other files holds the trainings of one subject. `benchmarks/diagnosis.py` runs them.
"""
