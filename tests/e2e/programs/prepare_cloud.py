"""Makes in a moto server what the tests need, while it does not yet ask for signatures, and then what needs them.

    prepare_cloud.py PORT REGION BUCKET

Prints JSON: the access key of a user who may assume a role and use the bucket, and the role's name.
"""

import json
import sys

import boto3
from botocore.config import Config

port, region, bucket = sys.argv[1:]
options = {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": region}
ALL = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
)
TRUST = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"}],
    }
)

first = boto3.client("iam", aws_access_key_id="first", aws_secret_access_key="first", **options)
first.create_user(UserName="egressd")
first.put_user_policy(UserName="egressd", PolicyName="all", PolicyDocument=ALL)
key = first.create_access_key(UserName="egressd")["AccessKey"]

keys = {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
iam = boto3.client("iam", **keys, **options)
role = iam.create_role(RoleName="agent", AssumeRolePolicyDocument=TRUST)["Role"]["Arn"]
iam.put_role_policy(RoleName="agent", PolicyName="all", PolicyDocument=ALL)
s3 = boto3.client("s3", config=Config(s3={"addressing_style": "path"}), **keys, **options)
s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": region})
sys.stdout.write(json.dumps({"id": key["AccessKeyId"], "secret": key["SecretAccessKey"], "role": role}))
