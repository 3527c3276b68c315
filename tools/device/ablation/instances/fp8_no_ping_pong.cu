// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/no_ping_pong.cuh"

namespace flash3::device {

using Traits = WithoutPingPong<E4m3Traits<Variant::kNoPingPong>>;

}

FLASH3_ABLATION_INSTANCE(kE4m3, kNoPingPong, Traits, Fp8Producer<Traits>, ConsumerFp8<Traits>)
