"""Handwritten digits: 1,797 images of 8 by 8 pixels, from 0 to 16, in ten classes.

They come with scikit-learn, which Esper does not need for anything else.
"""

from importlib import import_module

import numpy as np
import torch

from esper.contracts.errors import BadInput
from esper.tasks.data import Data, check_data


def digits() -> Data:
    """The images as `[row, 1, 8, 8]`."""
    try:
        datasets = import_module("sklearn.datasets")
    except ImportError as error:
        raise BadInput(
            f"expected scikit-learn, which brings the digits; got {error}; "
            f"pip install scikit-learn"
        ) from error
    bunch = datasets.load_digits()
    images = torch.from_numpy(bunch.images.astype(np.float32)).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    return check_data(Data("digits", images, labels, 10))
