"""For `make docs`: a public name that is also the name of its module is the function or class, not the module.

``gradcast.verify`` comes from the module ``gradcast.training.verify``. Reading sources alone, griffe takes the name for
the module.
"""

import griffe


class PublicNames(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        for name, member in list(pkg.members.items()):
            if not member.is_alias or not member.target_path.startswith(f"{pkg.name}."):
                continue
            target = pkg[member.target_path.removeprefix(f"{pkg.name}.")]
            if target.is_module and name in target.members:
                pkg.set_member(name, griffe.Alias(name, target=target.members[name]))
