"""``gradcast doctor``: explains why a training is slow and predicts what would help (docs/guide/doctor.md).

The package is not called ``doctor`` because ``gradcast.doctor`` is the public function. One measurement takes this way:

1. ``script.py`` runs a user's script under ``gradcast doctor``; ``context.py`` is ``with gradcast.doctor(...)``. Both
   check with ``preconditions.py`` that the training can be diagnosed, and start the ``Doctor`` of ``doctor.py``.
2. ``observe/observer.py`` times the ordinary steps and records the last ones (``recorded_step.py``);
   ``observe/loader.py`` times the DataLoaders; ``observe/environment.py`` reads threads, cores and variables.
3. ``probe/snapshot.py`` saves the training's state. ``probe/prober.py`` then replays the recorded steps with different
   process groups and DDP options, and ``probe/trial.py`` with gradcast attached.
4. ``network/check.py`` measures the links between the hosts. The snapshot is restored, and the training goes on.
5. ``doctor.py`` gathers each rank's ``RankMeasurements`` (``analyze/measurements.py``) on rank 0.
   ``analyze/result.py`` turns them into the fields of doctor.json: ``step_breakdown.py`` (where the time goes),
   ``lint.py`` (misconfiguration), ``actions.py`` (predicted speedups), ``bottleneck.py`` (the verdict),
   ``timelines.py`` (one step on every rank).
6. ``outcome.py`` writes doctor.json and the trace (``trace/merged.py``) and prints ``report/text.py``.
7. Later ``runs.py`` reads doctor.json back for ``gradcast report`` (``report/html``, ``report/metrics.py``) and
   ``gradcast compare`` (``report/run_comparison.py``).

Imports go down only: top level -> report -> analyze -> probe -> observe -> network -> trace. ``runs.py`` is a leaf.
Modules that need torch are imported when first used; ``analyze``, ``report`` and ``trace`` never need it.
"""
