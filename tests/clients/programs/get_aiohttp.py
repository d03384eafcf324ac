import asyncio
import sys

import aiohttp


async def main() -> None:
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(sys.argv[1]) as response:
        sys.stdout.write(await response.text())


asyncio.run(main())
