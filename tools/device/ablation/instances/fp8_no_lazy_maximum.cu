// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/no_lazy_maximum.cuh"

namespace flash3::device {

using Traits = E4m3Traits<Variant::kNoLazyMaximum>;

}

FLASH3_ABLATION_INSTANCE(kE4m3, kNoLazyMaximum, Traits, Fp8Producer<Traits>,
                         hopper::Consumer<Traits, EagerOperandsFp8<Traits>, StoreFp8<Traits>>)
