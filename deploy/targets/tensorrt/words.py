"""Words that the files of this target share: grids, types of the rest, and roles of files."""

INT8, FP8 = "int8", "fp8"
FP16, BF16, FP32 = "fp16", "bf16", "fp32"
FLOAT, CACHE = "float model for TensorRT", "TensorRT cache"
QDQ, TYPED = "TensorRT Q/DQ model", "TensorRT typed model"
PLAIN = "TensorRT float model without repairs, to compare with"
FLOAT_TYPED = "TensorRT float16 model, to compare with"
PART = "Q/DQ model up to its plugins"
