"""The client whose calls a subclass answers."""


class OpenAIChatCompletionsClient:
    def __init__(self, client):
        self.client = client

    async def get_response(self, prompt, model, sampling_args, tools=None):
        offered = [{"type": "function", "function": one} for one in tools] if tools else None
        response = await self.get_native_response(prompt, model, sampling_args, offered)
        await self.raise_from_native_response(response)
        return response["choices"][0]["message"]
