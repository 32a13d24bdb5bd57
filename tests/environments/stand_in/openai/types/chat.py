"""What a completion is made with."""


class ChatCompletion(dict):
    @classmethod
    def model_validate(cls, value):
        return cls(value)
