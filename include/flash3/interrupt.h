/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * A way to end a CPU call before its end. A part of flash3.h, which includes it. */
#ifndef FLASH3_INTERRUPT_H_
#define FLASH3_INTERRUPT_H_

#include "flash3/flash3.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Asked whether a call is to end: 0 goes on, anything else ends it. */
typedef int (*flash3_interrupt_function)(void);

/** From now on CPU calls of this process ask this function between their work tiles, about 20 times
 * a second, on the thread that made the call; NULL: none, as at first. Where it ends one, the call
 * returns FLASH3_CANCELLED: what it has written is undefined, new keys in a cache among it, and
 * nothing else has changed. A call that runs already keeps the function it began with. Not for GPU
 * calls, which return before their kernels end. */
FLASH3_API void flash3_set_interrupt(flash3_interrupt_function function);

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_INTERRUPT_H_ */
