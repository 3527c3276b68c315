# SPDX-License-Identifier: Apache-2.0
"""flash3 inside other libraries; each module imports its own when it is imported."""
