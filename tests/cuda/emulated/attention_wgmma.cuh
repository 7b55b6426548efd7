// In the place of native/kernels/attention_wgmma.cuh, which is Hopper's.
#pragma once
