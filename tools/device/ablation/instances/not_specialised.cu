// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/not_specialised.cuh"

namespace flash3::device {

using Traits = Fp16Traits<Variant::kNotSpecialised>;

}

FLASH3_ABLATION_INSTANCE(kFloat16, kNotSpecialised, Traits, NoProducer<Traits>,
                         LoadingConsumer<Traits, Consumer16Bit<Traits>>)
