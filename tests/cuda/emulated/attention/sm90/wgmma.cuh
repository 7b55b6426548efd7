// In the place of native/kernels/attention/sm90/wgmma.cuh, which is Hopper's.
#pragma once
