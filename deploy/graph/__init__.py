"""ONNX graph analysis: index, edits, quantization plan, tensor bounds and opset lowering.

`index.Graph` reads a model, `edit` is the only place that changes one, `placement` says where a
target wants its pairs, and `plan.analyse` decides what runs in int8 and why not the rest.
`tensor_pairs` finds the same tensor in a float and an int8 model. All are pure functions on models:
no sessions, no files, no targets by name.
"""
