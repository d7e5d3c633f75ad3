"""A regular package, for another distribution installs one of the same name, which would win over a bare folder."""
