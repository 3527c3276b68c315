# SPDX-License-Identifier: Apache-2.0
"""What this build is called: its libraries, and its operators in torch.ops.

A build for Hugging Face's hub has a module with a name of its own in this place (cmake/hub.cmake), so that it can be loaded beside
another flash3.
"""
NAME = "flash3"
