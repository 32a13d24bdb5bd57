"""Images of rows: their bytes, size and pixels, and what an image processor makes of them for a model.

files, decoding          bytes and digest of an image as a row writes it; its header's size; its RGB values
whole                    torn files, told without decoding
processor, pixels        layout of patches and tokens, and the tensors of a tower
positions                streams of a document whose tokens stand for images
qwen2_vl, gemma3, gemma4 the processors of these families
reading, fields          processor of a model's directory
reader, records          images of chats: image tokens in the text, streams and pixels; what a cache keeps of an image

Names are imported when they are used: what decodes nothing loads neither torch nor Pillow.
"""

from typing import TYPE_CHECKING

from dtrain.base.exports import late_names

if TYPE_CHECKING:
    from dtrain.data.images.decoding import MOST_PIXELS, Header
    from dtrain.data.images.files import ImageBytes, read_image
    from dtrain.data.images.processor import ImageProcessor, ImageTokens, Layout
    from dtrain.data.images.reader import ImageReader
    from dtrain.data.images.reading import read_processor
    from dtrain.data.images.records import ImageRecord

__all__ = [
    "MOST_PIXELS",
    "Header",
    "ImageBytes",
    "ImageProcessor",
    "ImageReader",
    "ImageRecord",
    "ImageTokens",
    "Layout",
    "read_image",
    "read_processor",
]
__getattr__ = late_names(
    __name__,
    {
        "decoding": "MOST_PIXELS Header",
        "files": "ImageBytes read_image",
        "processor": "ImageProcessor ImageTokens Layout",
        "reader": "ImageReader",
        "reading": "read_processor",
        "records": "ImageRecord",
    },
)[0]
