/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * The version of these headers; flash3_version() tells that of the library. CMake and the wheel
 * read it from here. */
#ifndef FLASH3_VERSION_H_
#define FLASH3_VERSION_H_

/** @{ The parts of the version, and all of it. */
#define FLASH3_VERSION_MAJOR 0
#define FLASH3_VERSION_MINOR 2
#define FLASH3_VERSION_PATCH 0
#define FLASH3_VERSION_STRING "0.2.0"
/** @} */

#endif /* FLASH3_VERSION_H_ */
