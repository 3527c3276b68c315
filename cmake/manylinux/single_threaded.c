/* SPDX-License-Identifier: Apache-2.0
 * What libstdc++'s headers ask of glibc since 2.32: whether the process has one thread. Never sure of it: counts are atomic. */
char __libc_single_threaded = 0;
