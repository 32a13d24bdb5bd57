"""Images that a plan takes the rows of a step to have, and what it says where it knows of none."""

from dtrain.commands.plan.images import densest, split, streams_of
from dtrain.commands.plan.plan import make_plan, resolve_plan
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.step import plan_step
from dtrain.data.images.processor import Layout
from tests.pictures import picture_recipe, write_model, write_rows


def image(tokens: int) -> Layout:
    return Layout(8, 8 * tokens, (1, 2, 2 * tokens), tokens)


def test_a_row_has_the_images_of_the_document_with_the_most_patches():
    documents = [(10, [image(3)]), (40, [image(8), image(1)]), (100, [image(20)]), (9, [])]
    assert densest(documents, 100, packed=False) == (image(20),)
    assert densest(documents, 100, packed=True) == (image(3),) * 10
    assert densest([(5, [image(5)])], 17, packed=True) == (image(5),) * 3
    assert densest([(5, [image(5)])], 16, packed=True) == (image(5),) * 2  # a token of text before each half


def test_images_stand_within_the_documents_of_their_row():
    for images in ([], [image(3)], [image(3)] * 10, [image(60)], [image(1), image(60)], [image(97), image(1)]):
        for length in (100, 101):
            (first, some), (second, others) = split(images, length, 2)
            assert first + second == length and [*some, *others] == images
            assert sum(each.tokens for each in some) < first and sum(each.tokens for each in others) < second
    assert [tokens for tokens, _ in split([image(3)] * 2, 101, 2)] == [51, 50]
    assert split([image(3)], 20, 1) == [(20, [image(3)])]
