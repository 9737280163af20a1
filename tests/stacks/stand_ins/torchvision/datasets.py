"""Names that are imported and never used."""


class VisionDataset: ...
