"""The wirings: how a sandbox's packets reach egressd and nothing else.

Import the module you need: this file stays empty, and what the maker imports stays light (no dataclasses, no subprocess,
no asyncio), because the maker's start-up time is every sandbox's start-up time.
"""
