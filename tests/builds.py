"""Which build of a kernel the tests run: this machine's own where the default device is a GPU, else the host's."""

import mlx.core as mx

from kernels.portable import device_build

BUILD = device_build() if mx.default_device().type == mx.DeviceType.gpu else "host"
