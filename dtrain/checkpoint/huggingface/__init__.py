"""Model directories in Hugging Face's layout: safetensors with config.json, read slice by slice and written.

read, pretrained      weights into a model; a model with its weights
write, export         a model's directory; `dtrain export`
safetensor_files      the tensors of a directory's files: headers and slices; mxfp4 and fp8 read as bfloat16
file_rows             how tensors of the model correspond to tensors of the files
converted             files of transformers models, whose tensors transformers converts
model_files           config.json, tokenizer and the other small files
quantized             weights in 4 bits
merged                full weights with their adapter merged; the base weights of an adapter
"""
