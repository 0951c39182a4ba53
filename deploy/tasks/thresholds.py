"""Thresholds of the forms of outputs, all in one place, each with its reason.

A form is certain or it is not used: outputs without a form are compared by their values.
"""

# --- boxes: a row of numbers per anchor, cell or query ---
UNIT_TOLERANCE = 1e-3  # rounding of a probability by float16 and resizing
MIN_ANCHORS = 10  # fewer rows are classes of a few steps
MIN_ROWS_PER_COLUMN = 2  # anchors are many more than the numbers of one, unless there are 100
MIN_QUERIES = 100  # queries of a DETR, which may be fewer than its numbers
MAX_EMPTY_SCORE = 0.1  # best probability of a row that detects nothing; half of all rows or more
MIN_EMPTY_SHARE = 0.9  # share of rows that detect nothing; raw scores of these are below 0
MIN_BACKGROUND_SHARE = 0.8  # share of rows that the background wins in front of a Softmax
MIN_CODED_SHARE = 0.99  # share of boxes with ordered corners, or with sizes that are not negative
MIN_CORNER_CORRELATION = 0.3  # corners move together, offsets and sizes do not
MAX_OUTSIDE_PICTURE = 0.1  # distance of a centre to the picture, relative to its side
MIN_INSIDE_SHARE = 0.95  # share of boxes whose centre is nearer than that
MIN_CENTRE_SPREAD = 0.1  # deviation of the centres, relative to the picture: a grid has 0.29
MIN_BINS = 4  # of a distribution of distances; models have 8 or more
MIN_PIXEL_SIDE = 4  # sides of detected boxes in pixels; logits of distances are lower
MAX_POINT_COLUMNS = 64  # numbers of a box with its key points
MIN_POINT_CORRELATION = 0.8  # key points of a box move with its centre
MAX_CELL_OFFSET = 16.0  # YOLOX's raw boxes: cells from the anchor, and the logarithm of a size
MIN_IDLE_SCORE = 0.1  # mean best class above which an objectness suppresses most rows
MIN_QUIET_SCORE = 0.02  # the same of rows that are the first dimension, as YOLO v5's are
DETECTION_SHARE = 1e-3  # share of the surest rows, which show the sizes of boxes
MAX_EMPTY_OBJECTNESS = 0.05  # mean objectness of raw levels
MIN_LIST_ROWS = 3  # rows of a list of boxes, which show its columns
MAX_RELATIVE_EXCESS = 0.05  # of a relative box over the picture, where it is cut at the edge
MAX_QUERIES = 1000  # queries of a DETR: more rows are anchors

# --- steps and text ---
MIN_STEPS = 4  # steps of a sample; fewer are a few vectors
MIN_TRACK_STEPS = 8  # steps of independent probabilities; fewer are labels
MIN_SYMBOL_CONFIDENCE = 0.8  # mean probability of the best symbol of raw scores, as CTC trains
MIN_DECIDED_SHARE = 0.5  # share of single probabilities below 0.1 or above 0.9
MAX_BETWEEN_SHARE = 0.25  # share of probabilities between 0.1 and 0.9
MAX_UNDECIDED_SHARE = 0.05  # share of probabilities of several tracks between 0.3 and 0.7
MAX_USUAL_SHARE = 0.75  # share of FP32's steps in one class, such as silence, above which only the
# others are counted
MIN_SYMBOLS = 11  # digits and a blank
MIN_BLANK_SHARE = 0.2  # share of steps that CTC leaves blank
MAX_WORD_STEPS = 16  # mean number of steps between blanks
MAX_SYMBOL_STEPS = 3  # mean number of steps of one symbol: CTC's symbols are peaks
MIN_TOKENS = 4  # whole numbers of an input that are tokens of a text: CTC reads pictures and sound
MAX_SIGNAL_STRIDE = 16  # an input signal is at most so many times as long as an output signal

# --- a vector per sample: classes, labels, embeddings ---
MIN_EMBEDDING_SIZE = 32  # numbers of an embedding; of as many raw scores the best stands out
MIN_STAND_OUT = 1.15  # best raw score, relative to the expected maximum of normal numbers
MIN_STAND_OUT_SIDE = 1.2  # distance of the best to the mean, relative to that of the worst
MAX_TANH = 1.05  # values of few raw scores, which leave the range of a Tanh
MAX_LOGIT_DRIFT = 0.5  # deviation of few raw scores' mean, relative to that of the scores
MAX_POSE_NUMBERS = 6  # numbers of a pose: angles, a rotation, a direction
MAX_COMMON_MOTION = 0.5  # variance of a pose's mean, relative to independent numbers
MIN_LEAD = 1.5  # lead of the best of few raw scores, relative to the range of the others
MIN_HEAD_CONFIDENCE = 0.5  # mean probability of the best raw score in several outputs
MIN_LABELS = 4  # fewer probabilities are numbers of something else
MIN_LOW_SHARE = 0.5  # share of a label's probabilities below 0.1
MIN_LOGIT_DEPTH = 0.75  # mean of labels' raw scores below 0, in standard deviations
MAX_LABEL_CONFIDENCE = 0.8  # probability of the best of raw labels by a Softmax
FEATURE_FACTOR = 16  # widths of networks are multiples of it, ImageNet's 1000 classes are not
MIN_ACTIVATION = -0.375  # least value of HardSwish, the lowest of the activations
MAX_LENGTH_DEVIATION = 1e-2  # deviation of a normalised vector's length from 1
MIN_L1_NORM = 2.0  # of a normalised vector: less may be probabilities of a few classes
MAX_POINT_ORDER = 0.5  # correlation of an embedding's numbers with those 1 to 3 before
MAX_MEAN_SHARE = 0.25  # mean of an embedding's numbers, in standard deviations
MAX_SIDE_RATIO = 1.6  # largest number to one side of 0, relative to the other side
MAX_NORMAL_PEAK = 1.5  # largest number of an embedding, relative to that of normal numbers

# --- key points ---
MIN_POINTS, MAX_POINTS = 4, 600  # points of an output: a quadrangle, a mesh of a face
MIN_FLAT_POINTS = 8  # points of a flat output, whose order must show
MIN_POINT_STEP_ORDER = 0.6  # correlation of coordinates with those of the point before
MIN_ORDER_LEAD = 0.2  # the same of known numbers per point, above that of any neighbours
MAX_ORDER_LOSS = 0.1  # loss of correlation that is accepted for fewer numbers per point
MEAN_COORDINATE = 0.15, 0.85  # range of the mean coordinate, relative to the picture's side
COORDINATE_SPREAD = 0.01, 0.5  # range of a sample's deviation, relative to the picture's side
MAX_POINT_OUTSIDE = 0.5  # distance of a point to the picture, relative to its side
MAX_RELATIVE_COORDINATE = 1.5  # larger ones are in pixels
MAX_END_DISTANCE = 0.02  # values as near to 0 or 1 are probabilities
MAX_END_SHARE = 0.25  # share of relative coordinates that are as near
MIN_VISIBLE = 0.2  # confidence of a point that is present
MIN_DECIDED_VISIBILITY = 0.75  # share of visibilities below 0.1 or above 0.9
MAX_POINT_DISTANCE = 0.03  # of matching points, relative to the extent of a sample's points
MAX_STEPS_PER_PIXEL = 4  # of SimCC's columns and rows
MIN_SIMCC_PEAK = 0.25  # peak of a point that is present, relative to the sample's highest
MAX_SIMCC_PIXELS = 2  # distance of matching points

# --- values ---
MIN_VARIATION = 1e-3  # change of outputs from sample to sample, relative to the first one's
SUM_ROUNDING = 1e-2  # error of a sum of probabilities in float16 over thousands of classes
MIN_ORDERED_CLASSES = 8  # classes in an order, such as ages
MIN_NEIGHBOUR_CORRELATION = 0.5  # of their probabilities with those of the next class
MIN_RELATIVE_SHARE = 0.5  # share of relative values in 0.1..0.9; probabilities lie at the ends
MIN_SINGLE_SHARE = 0.75  # the same of single values
MIN_EVENT_SAMPLES = 16  # samples of which some would show an event, near 1
MAX_LOGIT = 40.0  # larger magnitudes are of another unit
MIN_SIDE_DISTANCE = 5.0  # distance of raw scores on both sides of 0, in their own deviations
MAX_CHANCE_ORDERS = 1e4  # orders of a few values, of which one is sorted by chance
MIN_SORTED_VALUES = 5  # fewer probabilities may be in one order in every sample

# --- slices of an output ---
FORM_SAMPLES = 4  # samples from which the form is derived
FORM_SAMPLES_OF_FEW = 32  # the same of outputs of few values
FEW_VALUES = 16  # values of an output that need more samples
MIN_UNIT_RATIO = 8.0  # of every row of the larger unit to any of the smaller
MAX_SILENT_PEAK = 0.01  # rows whose peak stays below it show no unit
MIN_ROW_VALUES = 16  # fewer values per row (as in [N, classes]) do not show its range
MAX_LOW_SCORE = 0.2  # scores below it are low, above 1 - it high
MIN_END_SHARE = 0.1  # share of sure scores near 0, and near 1
MIN_GATE_DECIDED = 0.75  # share of scores near 0 or 1 beside other values of 0..1
