"""Code that jobs of several platforms share: a job's record, its failure, signals and packages."""
