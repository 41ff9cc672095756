"""Why is a training as slow as it is, and what would help? (docs/doctor.md)

``doctor.py`` runs one diagnosis inside a training: ``observe`` watches ordinary steps, ``probe`` runs extra ones,
``network`` measures the hosts' links, ``analyze`` turns the numbers into findings, ``report`` shows them, ``trace``
holds the trace of all ranks. The package is not called ``doctor`` because ``gradcast.doctor`` is the public function.
Modules that need torch are imported when first used.
"""
