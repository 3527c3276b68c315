/* SPDX-License-Identifier: Apache-2.0 */
/* Which symbols leave the library. Everything else is hidden. */
#ifndef FLASH3_EXPORT_H_
#define FLASH3_EXPORT_H_

#if defined(FLASH3_BUILDING_SHARED) && defined(__GNUC__)
#define FLASH3_API __attribute__((visibility("default")))
#else
#define FLASH3_API
#endif

#endif /* FLASH3_EXPORT_H_ */
