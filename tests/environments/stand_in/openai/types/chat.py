"""Parameters of a chat completion."""


class ChatCompletion(dict):
    @classmethod
    def model_validate(cls, value):
        return cls(value)
